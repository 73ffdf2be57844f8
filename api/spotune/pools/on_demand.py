"""What a deadline changes in the choice between pools: when on-demand pools may be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from spotune.pools.terms import Pool, PoolMemory


class OnDemandUse(StrEnum):
    """When on-demand pools carry workers."""

    AS_LISTED = "as listed"
    """Like any other pool, in the given order."""
    NOT_YET = "not yet"
    """They get no new worker while the job can wait for spot nodes. Their present ones stay until these come."""
    FIRST = "first"
    """Before all spot pools, without a pause after a refusal: only they keep the deadline."""


def with_on_demand(
    pools: Sequence[Pool], memory: Mapping[str, PoolMemory], use: OnDemandUse
) -> tuple[list[Pool], dict[str, PoolMemory]]:
    """The pools in the order in which they are tried, and their memory, for ``spotune.pools.choice.choose``.

    Args:
        pools: The pools, the best first.
        memory: What is remembered of them.
        use: When on-demand pools carry workers. An on-demand pool that is better than all spot pools is always used.
    """
    if use is OnDemandUse.AS_LISTED:
        return list(pools), dict(memory)
    if use is OnDemandUse.NOT_YET:
        spot = next((index for index, pool in enumerate(pools) if not pool.on_demand), len(pools))
        limited = [
            replace(pool, most=0) if pool.on_demand and index > spot else pool for index, pool in enumerate(pools)
        ]
        return limited, dict(memory)
    safe = {pool.name for pool in pools if pool.on_demand}
    eager = {name: replace(found, retry_at=None) if name in safe else found for name, found in memory.items()}
    return sorted(pools, key=lambda pool: not pool.on_demand), eager
