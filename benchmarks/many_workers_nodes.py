"""Nodes of `many_workers.py`: their workers speak the protocol of a worker group, and train nothing.

All of them live in one Ray actor. Rank 0 reports progress, every rank reads notices after each step and writes its file
of each commit, and rank 0 waits for those of all ranks: by the code that real ranks run. What ranks say to one another
over `torch.distributed` does not reach the driver, and is left out.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from spotune_trainer.checkpoint.async_checkpointer import CommitResult
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry, Manifest
from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress
from spotune_trainer.checkpoint.writer import commit, prune, write_fragments
from spotune_trainer.job_directory.notice import Flags, NoticeWatch
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import ProgressReporter, StepRecord
from spotune_trainer.observability.stragglers import StragglerMeter
from spotune_trainer.training.task import RankExit, RankPlacement, RankResult, WorkerTask
from spotune_trainer.worker_group.fitness.measurements import DeviceMeasurement, NodeMeasurement
from spotune_trainer.worker_group.node_state import NodeGroup, NodeInfo
from tests.trainer.support.checkpoints import SHAPES, fragments_of_rank, make_state

_GPU = "simulated GPU"
_BLOCK_SECONDS = 2.0
"""Of the comparison of ranks; a minute in real groups. So the status has the own times of ranks from early on."""
_WRITERS = 16
"""Threads that write the files of a commit; real ranks have a thread each, on a machine each."""
_KEPT = 2


@dataclass(frozen=True)
class Pace:
    """How fast a group trains.

    Attributes:
        steps: of the run.
        step_seconds: of each.
        commit_every: steps.
    """

    steps: int
    step_seconds: float
    commit_every: int


@dataclass
class _Group:
    """A generation: the ranks of each node, and what becomes of them."""

    task: WorkerTask
    world_size: int
    parts: dict[int, NodeGroup] = field(default_factory=dict)
    ended: Future[RankExit] = field(default_factory=Future)

    @property
    def is_complete(self) -> bool:
        return sum(len(part.placements) for part in self.parts.values()) == self.world_size


class SimulatedNodes:
    """The agents of all nodes, in one asynchronous actor. Each node has a number, and one slot.

    Args:
        pace: of groups.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._group: _Group | None = None
        self._forever = asyncio.Event()

    async def call(self, number: int, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the agent of a node, as `NodeProxy.call`."""
        match method:
            case "info":
                peer = PeerAddress(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 4000)
                return NodeInfo(peer.host, 1 << 36, peer, f"node-{number:04d}", "boot", is_of_cluster=True)
            case "measure":
                device = DeviceMeasurement(0, "cuda", _GPU, 1 << 30, random.uniform(600.0, 620.0))
                return NodeMeasurement((device,), (), 1.0)
            case "pull_rates":
                await asyncio.sleep(0.25 * len(args[0]))
                return [random.uniform(1e9, 1.1e9) for _ in args[0]]
            case "free_port":
                return 29500
            case "group":
                return self._group.parts.get(number) if self._group is not None else None
            case "run_ranks":
                return await self._run_ranks(number, *args)
            case "wait_for_ranks":
                return await self._results(number)
        return None  # import_modules, abort, kill_ranks

    async def block_forever(self, _number: int) -> None:
        """As `NodeProxy.block_forever`."""
        await self._forever.wait()

    async def exit_agent(self, _number: int) -> None:
        """As `NodeProxy.exit_agent`."""

    async def _run_ranks(
        self, number: int, task: WorkerTask, placements: Sequence[RankPlacement], *_: Any
    ) -> list[RankResult]:
        if self._group is None or self._group.task.generation != task.generation:
            self._group = _Group(task, placements[0].world_size)
        group = self._group
        group.parts[number] = NodeGroup(task, tuple(placements))
        if group.is_complete:
            threading.Thread(target=self._train, args=(group,), daemon=True).start()
        return await self._results(number)

    async def _results(self, number: int) -> list[RankResult]:
        assert self._group is not None, "its ranks have been started"
        group = self._group
        reason = await asyncio.wrap_future(group.ended)
        summary = {"steps": self._pace.steps, "samples": self._pace.steps * group.world_size}
        return [
            RankResult(place.rank, 0, reason, summary if place.rank == 0 and reason is RankExit.TRAINED else None)
            for place in group.parts[number].placements
        ]

    def _train(self, group: _Group) -> None:
        try:
            group.ended.set_result(_Ranks(group.task, group.world_size, self._pace).train())
        except BaseException as error:  # noqa: BLE001 - the driver gets it
            group.ended.set_exception(error)


class _Ranks:
    """All ranks of a group, one after the other at each step."""

    def __init__(self, task: WorkerTask, world_size: int, pace: Pace) -> None:
        self._task = task
        self._world_size = world_size
        self._pace = pace
        self._directory = task.job_directory
        paths = self._directory.notice, task.logs.notice, task.logs.agent_notice
        self._watches = [NoticeWatch(paths) for _ in range(world_size)]
        self._meter = StragglerMeter([f"node-{rank:04d}" for rank in range(world_size)], _BLOCK_SECONDS)
        self._state = make_state()
        self._writers = ThreadPoolExecutor(_WRITERS)
        self._commit: Future[CommitResult] | None = None

    def train(self) -> RankExit:
        """Make all steps, or those until a notice."""
        with ProgressReporter(self._task.logs, 0, hang_timeout_seconds=600) as reporter:
            for part in ("connect", "model", "data"):
                reporter.record_startup(part)
            reporter.set_phase(Phase.TRAINING)
            started = time.monotonic()
            for step in range(1, self._pace.steps + 1):
                time.sleep(max(0.0, started + step * self._pace.step_seconds - time.monotonic()))
                flags = reduce(or_, (watch.flags(1.0) for watch in self._watches), Flags())
                self._report(reporter, step)
                is_last = step == self._pace.steps
                if flags.commit or is_last or step % self._pace.commit_every == 0:
                    self._finish_commit(reporter)
                    self._commit = ThreadPoolExecutor(1).submit(self._save, step, reporter)
                elif self._commit is not None and self._commit.done():
                    self._finish_commit(reporter)
                if flags.leave or flags.stop:
                    self._finish_commit(reporter)
                    return RankExit.YIELDED if flags.leave else RankExit.STOPPED
            self._finish_commit(reporter)
        return RankExit.TRAINED

    def _report(self, reporter: ProgressReporter, step: int) -> None:
        seconds = self._pace.step_seconds
        own = [seconds * random.uniform(0.97, 1.0) for _ in range(self._world_size)]
        if self._meter.record(own, [1] * self._world_size):
            reporter.update(**self._meter.as_json())
        record = StepRecord(
            generation=self._task.generation,
            step=step,
            epoch=step / self._pace.steps,
            loss=1.0 / step,
            gradNorm=1.0,
            learningRate=1e-4,
            tokens=512 * self._world_size,
            labelTokens=256 * self._world_size,
            seconds=seconds,
            productiveSeconds=seconds,
            dataWaitSeconds=0.0,
            worldSize=self._world_size,
            samples="0123456789abcdef",
            skipped=False,
            mfu=0.4,
        )
        reporter.heartbeat()
        reporter.record_step(record, self._world_size, self._pace.steps)

    def _save(self, step: int, reporter: ProgressReporter) -> CommitResult:
        started = time.monotonic()
        name = CheckpointName(step, self._task.generation)
        folder = self._directory.checkpoints / str(name)

        def write(rank: int) -> FileEntry:
            return write_fragments(folder, rank, fragments_of_rank(self._state, self._world_size, rank))

        written = [self._writers.submit(write, rank) for rank in range(self._world_size)]

        def manifest(files: tuple[FileEntry, ...]) -> Manifest:
            reporter.sync()
            return Manifest(
                step=step,
                generation=name.generation,
                optimizer_step=step,
                fingerprint=self._task.plan["fingerprint"],
                plan_version=1,
                world_size=self._world_size,
                zero_stage=2,
                time=time.time(),
                files=files,
                parameters=SHAPES,
            )

        made = commit(self._directory, name, self._world_size, manifest)
        for each in written:
            each.result()
        prune(self._directory, name.generation, _KEPT)
        return CommitResult(name, made, 0.0, time.monotonic() - started)

    def _finish_commit(self, reporter: ProgressReporter) -> None:
        """Report the pending commit once it is durable, as `Checkpointing` does."""
        if self._commit is None:
            return
        result, self._commit = self._commit.result(), None
        assert result.manifest is not None, "rank 0 has written it"
        reporter.update(lastCheckpoint={"step": result.name.step, "time": result.manifest.time})
        reporter.record_event("committed", **result.as_event())
