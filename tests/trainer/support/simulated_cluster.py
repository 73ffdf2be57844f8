"""A simulated cluster for a driver, without Ray: scripted worker groups, and a clock that only `sleep` advances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotune.plan.devices import machine_memory_bytes
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.driver.driver import DriverDependencies
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.result import Failed, FoundGroup, GroupResult, Slots, Trained
from tests.trainer.support.checkpoints import commit_checkpoint

SUMMARY = {"steps": 10, "samples": 150, "trainLoss": 1.5, "evalLoss": 1.25, "exportSha256": "ab"}
TRAINED = Trained(SUMMARY)
LOST = Failed(FailureCause.WORKER_LOST, "lost rank 1 (ActorDiedError)")
BROKEN = Failed(FailureCause.APP_ERROR, "rank 0: ValueError: row 7 has no labels")
OUT_OF_MEMORY = Failed(FailureCause.OUT_OF_MEMORY, "rank 0: OutOfMemoryError: CUDA out of memory")


@dataclass
class ScriptedGroup:
    """Script of one worker group: it trains to `last_step`, commits the steps of `commits`, and exits with `result`."""

    result: GroupResult
    last_step: int = 0
    commits: Sequence[int] = ()
    before_exit: Callable[[], object] | None = None


@dataclass
class SimulatedAgents:
    """Agents of a `SimulatedCluster`. Each node has one slot; a group runs on the first nodes."""

    cluster: SimulatedCluster

    def draining(self) -> dict[str, float]:
        return self.cluster.draining

    def ensure(self, gpus: bool) -> Slots:
        slots = len({f"n{number}" for number in range(self.cluster.slots)} - self.cluster.draining.keys())
        return Slots(slots, min(slots, self.cluster.ready), min(slots, self.cluster.ready))

    def occupied(self) -> set[str]:
        return {f"n{rank}" for rank in range(self.cluster.sizes[-1])} if self.cluster.sizes else set()

    def unfit_nodes(self) -> list[dict[str, Any]]:
        return self.cluster.unfit

    def leave_out(self, rank: int, reason: str, at_least: int) -> bool:
        raise AssertionError("no simulated rank is slow")

    def worker_memory_bytes(self, workers: int, gpus: bool) -> int:
        return machine_memory_bytes() // workers

    def run_group(self, task: WorkerTask, world_size: int) -> GroupResult:
        return self.cluster.run_group(task, world_size)

    def find_group(self, generation: int) -> FoundGroup | None:
        return self.cluster.left_group

    def adopt_group(self, group: FoundGroup) -> GroupResult:
        return self.cluster.run_group(group.task, group.world_size)

    def kill_ranks(self) -> None:
        self.cluster.left_group = None


@dataclass
class SimulatedCluster:
    """Runs scripted worker groups one after the other, and records what the driver asked for.

    Attributes:
        groups: scripts, one for each group that the driver starts.
        slots: nodes of the cluster, with one slot each.
        ready: nodes whose agent is ready, at most.
        draining: nodes that drain, with their deadlines.
        tasks: of the groups that were started.
        sizes: their numbers of workers.
        started: times at which they started, in seconds.
        now: the clock, in seconds.
        while_sleeping: called at each sleep of the driver.
        left_group: what is found of the group of an earlier driver.
        unfit: nodes that are left out.
    """

    groups: list[ScriptedGroup]
    slots: int = 2
    ready: int = 99
    draining: dict[str, float] = field(default_factory=dict)
    tasks: list[WorkerTask] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    now: float = 0.0
    while_sleeping: Callable[[], object] | None = None
    left_group: FoundGroup | None = None
    unfit: list[dict[str, Any]] = field(default_factory=list)

    def dependencies(self) -> DriverDependencies:
        return DriverDependencies(SimulatedAgents(self), lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.while_sleeping is not None:
            self.while_sleeping()

    def run_group(self, task: WorkerTask, world_size: int) -> GroupResult:
        group = self.groups[len(self.tasks)]
        self.tasks.append(task)
        self.sizes.append(world_size)
        self.started.append(self.now)
        logs, directory = task.logs, JobDirectory(Path(task.directory))
        logs.root.mkdir(parents=True, exist_ok=True)
        first = CheckpointName.parse(task.restore).step if task.restore else 0
        first = max((line["step"] for line in files.read_lines(logs.steps)), default=first)  # of a group that goes on
        for step in range(first + 1, group.last_step + 1):
            record = {"generation": task.generation, "step": step, "seconds": 0.1, "tokens": 10, "loss": 1.0}
            files.append_json(logs.steps, {**record, "productiveSeconds": 0.08})
        for step in group.commits:
            commit_checkpoint(directory, step, task.generation)
        if group.before_exit is not None:
            group.before_exit()
        return group.result
