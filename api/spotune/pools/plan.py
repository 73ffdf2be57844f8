"""What a job's plan is in each of its pools: GPU, number of workers, layout, memory, and price per hour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spotune.errors import SpotuneError
from spotune.job import FinetuneJob, PoolSpec, cheapest_first
from spotune.plan.job.job_plan import Device, JobPlan, WorkersPlan

PlanFor = Callable[[Mapping[int, Device]], JobPlan]
"""Plans a job for numbers of worker processes, each with its device."""
DeviceFor = Callable[[str, int], Device]
"""The device of a worker with a GPU of a type (as a label names it; empty: any) in a group of so many processes.

It raises SpotuneError for a type that is not known, or cannot compute in the job's precision.
"""


@dataclass(frozen=True)
class PoolPlan:
    """The plan of a worker group that is in one pool alone.

    Attributes:
        pool: The pool.
        workers: Number of pods that it may carry.
        plan: The plan of that many pods; None if the device is not known.
        problem: Why there is no plan, or no layout that fits; empty if there is one.
    """

    pool: PoolSpec
    workers: int
    plan: WorkersPlan | None
    problem: str

    @property
    def cost_per_hour(self) -> float | None:
        """Price of all its nodes for an hour, in the currency of the pool; None without a price."""
        return None if self.pool.price is None else round(self.workers * self.pool.price.amount, 6)

    def as_json(self, plan: Mapping[str, Any] | None) -> dict[str, Any]:
        """The pool with camelCase keys; unknown values null.

        Args:
            plan: The JSON form of its plan.
        """
        pool = self.pool
        return {
            "name": pool.name,
            "capacity": pool.capacity,
            "zone": pool.zone or None,
            "gpuType": pool.gpu_type or None,
            "price": pool.price,
            "workers": self.workers,
            "costPerHour": self.cost_per_hour,
            "currency": pool.price.currency if pool.price is not None else None,
            "problem": self.problem or None,
            "plan": plan,
        }


def plan_pools(job: FinetuneJob, plan_for: PlanFor, device_for: DeviceFor) -> list[PoolPlan]:
    """The plan in each pool, in the order in which pools are tried.

    Args:
        job: A job; without pools the result is empty.
        plan_for: Plans the job.
        device_for: The device of a worker by the type of its GPU.
    """
    workers, found = job.spec.workers, []
    for pool in cheapest_first(workers.pools):
        pods = min(workers.count, pool.max or workers.count)
        processes = pods * max(workers.gpus, 1)
        try:
            (plan,) = plan_for({processes: device_for(pool.gpu_type, processes)}).workers
        except SpotuneError as error:
            found.append(PoolPlan(pool, pods, None, str(error)))
            continue
        problem = plan.problem if plan.choice is None else "" if plan.choice.fits else plan.choice.reason
        found.append(PoolPlan(pool, pods, plan, problem))
    return found
