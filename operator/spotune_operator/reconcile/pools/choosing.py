"""The choice between a job's pools: from its pods and its status, and back into its status.

All that is remembered is in the status, so that an operator that restarts goes on where the last one was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from spotune.job import FinetuneJob, FinetuneJobStatus, PoolStatus, WorkersSpec, cheapest_first
from spotune.pools.choice import choose, unchanged
from spotune.pools.of_job import pools_of
from spotune.pools.on_demand import OnDemandUse, with_on_demand
from spotune.pools.terms import Choice, PoolMemory, Wish, Worker
from spotune.units.timestamps import rfc3339, unix_time
from spotune_operator.children.raycluster import Replicas
from spotune_operator.observe.state import Pod


def choose_pools(
    job: FinetuneJob,
    pods: Iterable[Pod],
    previous: FinetuneJobStatus,
    count: int,
    generation: int,
    now: float,
    on_demand: OnDemandUse = OnDemandUse.AS_LISTED,
) -> Choice:
    """The desired workers of each pool.

    Args:
        job: A job with pools.
        pods: Its pods, also those that are being deleted.
        previous: The status of the last reconcile.
        count: Desired number of workers; 0 while they would have no work.
        generation: ``metadata.generation`` of the job: once it has changed, no cooldown delays what the user asks for.
        now: Unix time. The choice has whole seconds, as the status has.
        on_demand: What the deadline asks for.
    """
    workers = job.spec.workers
    pools, memory = with_on_demand(pools_of(workers), _memory(previous), on_demand)
    is_same = generation == previous.observed_generation
    cooldown = 0.0 if on_demand is OnDemandUse.FIRST else workers.resize_cooldown.seconds
    return choose(
        pools,
        [_worker(pod) for pod in pods if pod.component == "workers"],
        memory,
        Wish(count, workers.min_count, cooldown),
        moved_at=unix_time(previous.pools_moved_at) if is_same else None,
        now=math.floor(now),
    )


def unchanged_pools(job: FinetuneJob, pods: Iterable[Pod], previous: FinetuneJobStatus) -> Choice:
    """The choice while the job commits or has no work: its workers stay where they are."""
    workers = [_worker(pod) for pod in pods if pod.component == "workers"]
    moved_at = unix_time(previous.pools_moved_at)
    return unchanged(pools_of(job.spec.workers), workers, _memory(previous), moved_at)


def _memory(previous: FinetuneJobStatus) -> dict[str, PoolMemory]:
    return {
        pool.name: PoolMemory(pool.refusals, unix_time(pool.refused_at), unix_time(pool.retry_at), tuple(pool.leaving))
        for pool in previous.pools
    }


def replicas_of(choice: Choice) -> Replicas:
    """The number of pods in the group of each pool, with the pods that KubeRay is to delete."""
    leaving = {name: memory.leaving for name, memory in choice.memory.items() if memory.leaving}
    return Replicas(0, pools=choice.replicas, leaving=leaving)


def first_replicas(job: FinetuneJob, workers: int) -> Replicas:
    """The number of pods in each group of a new job with so many workers."""
    if not job.spec.workers.pools:
        return Replicas(workers)
    return Replicas(0, pools=choose(pools_of(job.spec.workers), [], {}, Wish(workers), moved_at=None, now=0.0).replicas)


def pool_statuses(
    workers: WorkersSpec, choice: Choice, pods: Iterable[Pod], node_seconds: Mapping[str, float]
) -> list[PoolStatus]:
    """The status of each pool, in the order in which they are tried.

    Args:
        workers: ``spec.workers`` of a job with pools.
        choice: The last one.
        pods: Its pods.
        node_seconds: Seconds of nodes that ran workers, by pool.
    """
    staying = [pod for pod in pods if pod.component == "workers" and pod.deleting_since is None]
    found = []
    for pool in cheapest_first(workers.pools):
        memory = choice.memory[pool.name]
        running = [pod.runs for pod in staying if pod.group == pool.name]
        found.append(
            PoolStatus(
                name=pool.name,
                running=sum(running),
                pending=len(running) - sum(running),
                refusals=memory.refusals,
                refused_at=_time(memory.refused_at),
                retry_at=_time(memory.retry_at),
                price=pool.price or "",
                node_seconds=node_seconds.get(pool.name, 0.0),
                leaving=list(memory.leaving),
            )
        )
    return found


def _worker(pod: Pod) -> Worker:
    return Worker(
        name=pod.name,
        pool=pod.group,
        created=pod.created,
        has_node=bool(pod.node) or pod.phase == "Running",
        ready=pod.runs and pod.ready,
        is_going=pod.deleting_since is not None,
    )


def _time(seconds: float | None) -> str | None:
    return rfc3339(seconds) if seconds is not None else None
