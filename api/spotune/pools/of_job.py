"""The pools of a job as the choice between them knows them."""

from __future__ import annotations

from spotune.job import WorkersSpec, cheapest_first
from spotune.pools.terms import Pool


def pools_of(workers: WorkersSpec) -> list[Pool]:
    """The pools of a job in the order in which they are tried."""
    return [
        Pool(
            name=pool.name,
            most=pool.max or workers.count,
            after=(pool.after or workers.pool_patience).seconds,
            kind="" if workers.mix_gpu_types else pool.gpu_type,
            on_demand=pool.capacity == "on-demand",
        )
        for pool in cheapest_first(workers.pools)
    ]
