"""The limit of what the workers of a job may cost.

The price is that of GPU seconds in the status, on spot and on-demand nodes, by the prices in the operator's settings.
"""

from __future__ import annotations

import math
from typing import Final

from spotune.job import FinetuneJob, FinetuneJobStatus
from spotune_operator.kube.conditions import Finding
from spotune_operator.settings import Settings

COST: Final = "CostLimitReached"
_HOUR: Final = 3600.0


def cost_so_far(status: FinetuneJobStatus, settings: Settings) -> float | None:
    """Price of the GPU seconds of the workers; None without prices."""
    if min(settings.spot_gpu_price, settings.on_demand_gpu_price) <= 0:
        return None
    used = status.gpu_seconds
    return (used.spot * settings.spot_gpu_price + used.on_demand * settings.on_demand_gpu_price) / _HOUR


def is_over_budget(job: FinetuneJob, status: FinetuneJobStatus, settings: Settings) -> bool:
    """Whether the workers have cost what they may."""
    limit, cost = job.spec.max_cost, cost_so_far(status, settings)
    return limit is not None and cost is not None and limit.currency == settings.currency and cost >= limit.amount


def cost_finding(job: FinetuneJob, status: FinetuneJobStatus, settings: Settings) -> Finding | None:
    """The finding ``CostLimitReached``; None without a limit."""
    limit, cost = job.spec.max_cost, cost_so_far(status, settings)
    if limit is None:
        return None
    if cost is None or limit.currency != settings.currency:
        needed = f"prices in {limit.currency}: set spotGpuPrice, onDemandGpuPrice and currency in the chart's settings"
        return Finding(COST, "Unknown", "NoPrices", f"spec.maxCost has no effect, because the operator has no {needed}")
    if is_over_budget(job, status, settings):
        return Finding(COST, "True", "Spent", f"the workers have cost {limit}: raise spec.maxCost to continue")
    share = math.floor(10 * cost / limit.amount) * 10
    return Finding(COST, "False", "WithinLimit", f"the workers have cost at least {share} % of {limit}")
