"""Checks that span workers, queue and limits of a job: what would have no effect, or could never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spotune.custom_resource.base import invalid
from spotune.job.lifecycle import TTL_WITH_SERVING

if TYPE_CHECKING:
    from spotune.job.finetunejob import FinetuneJobSpec

MAX_QUEUED_POOLS: Final = 7
"""Kueue's webhook for RayClusters refuses more: a Workload has eight pod sets, and one is the head's."""
TOO_MANY_POOLS: Final = f"Kueue takes {MAX_QUEUED_POOLS} pools at most: remove some, or cluster.queueName"


def check_limits(spec: FinetuneJobSpec) -> None:
    """Refuse limits and queues that the job's workers cannot follow.

    Raises:
        PydanticCustomError: With the field and the remedy.
    """
    if spec.ttl_seconds_after_finished is not None and spec.serving is not None:
        invalid("ttlSecondsAfterFinished", TTL_WITH_SERVING)
    pools, limit = spec.workers.pools, spec.max_cost
    if spec.cluster.queue_name and len(pools) > MAX_QUEUED_POOLS:
        invalid("workers.pools", TOO_MANY_POOLS)
    for pool in pools:
        if limit is not None and pool.price is not None and pool.price.currency != limit.currency:
            invalid("maxCost", f"{limit} has another currency than pool {pool.name}, {pool.price}: use one for both")
