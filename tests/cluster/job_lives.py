"""The stages of a job, from creation to the trained model; passes are checked after each stage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tests.cluster.reconciling import START, World

Stage = Callable[[World], Awaitable[None]]


async def _is_made(world: World) -> None:
    await world.create_job()


async def _head_runs(world: World) -> None:
    await world.run_pods(workers=0)
    await world.supervisor_says("Starting", "preflight", passed=False)


async def _preflight_has_passed(world: World) -> None:
    await world.supervisor_says("WaitingForWorkers", "running")


async def _trains(world: World) -> None:
    await world.run_pods(workers=2)
    await world.supervisor_says("Training", "running", step=10, totalSteps=100, loss=2.5, generation=1)


async def _has_lost_a_worker(world: World) -> None:
    checkpoint = {"step": 8, "time": START}
    more: dict[str, Any] = {"step": 12, "totalSteps": 100, "loss": 2.25, "generation": 2, "lastCheckpoint": checkpoint}
    await world.supervisor_says("Training", "running", restarts={"workerLost": 1}, resumedFromStep=8, **more)


async def _is_suspended(world: World) -> None:
    await world.edit_job(suspend=True)


async def _has_no_pods(world: World) -> None:
    await world.end_pods()


async def _goes_on(world: World) -> None:
    await world.edit_job(suspend=False)
    await world.settle()
    await world.run_pods(workers=2)
    await world.supervisor_says("Training", "running", step=20, totalSteps=100, loss=2.0, generation=3)


async def _is_trained(world: World) -> None:
    await world.supervisor_says("Done", "trained", step=100, totalSteps=100)


async def _is_over_for_long(world: World) -> None:
    world.now += 600


LIFE: tuple[Stage, ...] = (
    _is_made,
    _head_runs,
    _preflight_has_passed,
    _trains,
    _has_lost_a_worker,
    _is_suspended,
    _has_no_pods,
    _goes_on,
    _is_trained,
    _is_over_for_long,
)
"""All stages of a job, from creation to the trained model."""
TRAINING: tuple[Stage, ...] = LIFE[:4]
"""The stages until the job trains."""


async def live(world: World, stages: tuple[Stage, ...] = LIFE) -> list[dict[str, Any]]:
    """Run stages, with passes of the operator after each; returns a picture after each stage."""
    pictures = []
    for stage in stages:
        world.now += 10
        await stage(world)
        await world.settle()
        pictures.append(await world.picture())
    return pictures
