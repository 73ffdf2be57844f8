"""The limit of what the workers of a job may cost: ``spec.maxCost`` against ``status.cost``."""

from __future__ import annotations

import math
from typing import Final

from spotune.job import FinetuneJob, FinetuneJobStatus
from spotune_operator.kube.conditions import Finding

COST: Final = "CostLimitReached"


def cost_so_far(job: FinetuneJob, status: FinetuneJobStatus) -> float | None:
    """Money that the workers have cost, in the currency of the limit; None if nothing is known in that currency."""
    limit, cost = job.spec.max_cost, status.cost
    if limit is None or cost is None or cost.currency != limit.currency:
        return None
    return cost.spent


def is_over_budget(job: FinetuneJob, status: FinetuneJobStatus) -> bool:
    """Whether the workers have cost what they may."""
    limit, cost = job.spec.max_cost, cost_so_far(job, status)
    return limit is not None and cost is not None and cost >= limit.amount


def cost_finding(job: FinetuneJob, status: FinetuneJobStatus) -> Finding | None:
    """The finding ``CostLimitReached``; None without a limit."""
    limit, cost = job.spec.max_cost, cost_so_far(job, status)
    if limit is None:
        return None
    if status.cost is None:
        return Finding(COST, "Unknown", "NoWorkersYet", "no worker has cost anything yet")
    if cost is None:
        known = status.cost.unknown or f"prices are in {status.cost.currency}"
        remedy = f"set price in workers.pools, or prices in the chart's values, in {limit.currency}"
        return Finding(COST, "Unknown", "NoPrices", f"spec.maxCost has no effect: {known}; {remedy}")
    if is_over_budget(job, status):
        return Finding(COST, "True", "Spent", f"the workers have cost {limit}: raise spec.maxCost to continue")
    share = math.floor(10 * cost / limit.amount) * 10
    return Finding(COST, "False", "WithinLimit", f"the workers have cost at least {share} % of {limit}")
