"""A world for drivers without Ray: worker groups go as written down, and time passes only while the driver sleeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spotune.plan.devices import machine_memory_bytes
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.driver.driver import Surroundings
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.result import Failed, GroupEnd, Room, Trained
from tests.trainer.support.checkpoints import put_checkpoint

FIGURES = {"steps": 10, "samples": 150, "trainLoss": 1.5, "evalLoss": 1.25, "exportSha256": "ab"}
TRAINED = Trained(FIGURES)
LOST = Failed(FailureCause.WORKER_LOST, "lost rank 1 (ActorDiedError)")
BROKEN = Failed(FailureCause.APP_ERROR, "rank 0: ValueError: row 7 has no labels")
OUT_OF_MEMORY = Failed(FailureCause.OUT_OF_MEMORY, "rank 0: OutOfMemoryError: CUDA out of memory")


@dataclass
class Group:
    """How one worker group goes: trains up to a step, commits some, and ends."""

    end: GroupEnd
    last: int = 0
    commits: Sequence[int] = ()
    before_end: Callable[[], object] | None = None


@dataclass
class Stub:
    """The agents of a `World`: each of its nodes has one slot, and a group is on the first ones."""

    world: World

    def draining(self) -> dict[str, float]:
        return self.world.draining

    def muster(self, gpus: bool) -> Room:
        assert not gpus
        slots = len({f"n{number}" for number in range(self.world.slots)} - self.world.draining.keys())
        return Room(slots, min(slots, self.world.ready))

    def occupied(self) -> set[str]:
        return {f"n{rank}" for rank in range(self.world.sizes[-1])} if self.world.sizes else set()

    def worker_memory_bytes(self, workers: int, gpus: bool) -> int:
        return machine_memory_bytes() // workers

    def run_group(self, task: WorkerTask, world_size: int) -> GroupEnd:
        return self.world.run_group(task, world_size)


@dataclass
class World:
    """A cluster in which worker groups go as written down, and time passes only while the driver sleeps."""

    groups: list[Group]
    slots: int = 2
    ready: int = 99
    draining: dict[str, float] = field(default_factory=dict)
    tasks: list[WorkerTask] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    now: float = 0.0
    while_sleeping: Callable[[], object] | None = None

    def surroundings(self) -> Surroundings:
        return Surroundings(Stub(self), lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.while_sleeping is not None:
            self.while_sleeping()

    def run_group(self, task: WorkerTask, world_size: int) -> GroupEnd:
        group = self.groups[len(self.tasks)]
        self.tasks.append(task)
        self.sizes.append(world_size)
        self.started.append(self.now)
        logs, directory = task.logs, JobDirectory(Path(task.directory))
        logs.root.mkdir(parents=True)
        first = CheckpointName.parse(task.restore).step if task.restore else 0
        for step in range(first + 1, group.last + 1):
            record = {"generation": task.generation, "step": step, "seconds": 0.1, "tokens": 10, "loss": 1.0}
            files.append_json(logs.steps, {**record, "productiveSeconds": 0.08})
        for step in group.commits:
            put_checkpoint(directory, step, task.generation)
        if group.before_end is not None:
            group.before_end()
        return group.end
