"""Injects the kills of a recovery schedule into the product: `spotune run` with one, two or three local nodes.

All kills are SIGKILL. A node that was killed is replaced by a new one, and a command that was killed is started again.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.layout import MANIFEST
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.ray_head.processes import Process
from tests.proof import injector
from tests.proof.history import committed
from tests.proof.injected import injected_path
from tests.proof.injected.recovery_moments import MOMENTS, Phase, Wire, phase_of, senders
from tests.proof.injected.slow_volume import VOLUME, Latency, set_latency
from tests.proof.injected.small_head import HEAD_SLOTS
from tests.proof.injection_points import newest_generation
from tests.proof.recovery.local_nodes import LocalNodes, node_of
from tests.proof.recovery.schedules import STEPS, Kill, Moment, RecoverySchedule, Target
from tests.trainer.support.live import LiveRun, kill

_PATIENCE_SECONDS = 300.0
_LATENCY = Latency(step=0.06, write=0.001, read=0.004, fsync=0.01)
_PHASES = {
    Moment.FORMING: Phase.FORMING,
    Moment.LOADING: Phase.LOADING,
    Moment.RESTORING: Phase.RESTORING,
    Moment.RESTORED: Phase.RESTORED,
}
_STEPS_OF_LOST_GROUP = 2
"""A group that has lost a rank logs no more steps than this."""
_POLL_SECONDS = 0.02
_LAST_STEP = STEPS - 3
"""A moment that has not come by then is missed."""


@dataclass(frozen=True)
class KillResult:
    """A kill that was injected.

    Attributes:
        step: the last step of the newest generation.
        hit: whether the run was at the moment right before the kill.
    """

    kill: Kill
    step: int
    hit: bool


class RecoveryInjector:
    """Runs one schedule in one job directory.

    Args:
        directory: a new job directory.
        schedule: the kills.
        job: returns the job for a number of workers.
        gpus: whether each worker has a GPU.
        environment: additional environment variables of the product's processes.

    Attributes:
        run: the command.
        results: of the kills so far.
    """

    def __init__(
        self,
        directory: JobDirectory,
        schedule: RecoverySchedule,
        job: Callable[[int], FinetuneJob],
        environment: Mapping[str, str] | None = None,
        *,
        gpus: bool = False,
    ) -> None:
        self._moments = directory.root.with_name(directory.root.name + ".moments")
        variables = {
            "PYTHONPATH": injected_path(),
            VOLUME: str(directory.root),
            MOMENTS: str(self._moments),
            HEAD_SLOTS: str(schedule.nodes[0]),
            **(environment or {}),
        }
        self.run = LiveRun(directory, job(schedule.world_size), variables, _PATIENCE_SECONDS)
        self.nodes = LocalNodes(self.run, schedule.nodes, gpus=gpus)
        self.schedule = schedule
        self.results: list[KillResult] = []
        self._job = job
        self._workers = schedule.world_size
        self._last_kill = (0, 0)

    def execute(self) -> tuple[int, str]:
        """Run to the end; returns exit code and output of the command. The run may end before the last kill."""
        self._moments.mkdir()
        set_latency(self.run.directory.root, _LATENCY)
        self._start()
        for kills in self.schedule.rounds:
            for each in kills:
                if not self._wait_for(each):
                    return self._wait()
                self._inject(each)
            self._complete_nodes()
        return self._wait()

    def clean_up(self) -> None:
        """Kill all processes of the run and remove the files beside it."""
        self.run.clean_up()
        injector.kill_leftovers(self.run.directory)
        shutil.rmtree(self._moments, ignore_errors=True)

    def _start(self) -> None:
        """Start the command, and let the other nodes join while it starts the driver."""
        self.run.start()
        self._wait_until(self._has_ray, "a Ray")
        self.nodes.join_missing()

    def _has_ray(self) -> bool:
        if self.run.has_ended():
            raise RuntimeError(f"the command ended before its Ray had started: {self.run.wait()[1]}")
        ray = self.run.ray()
        return ray is not None and ray.is_alive()

    def _wait(self) -> tuple[int, str]:
        self.nodes.wait_until_joined()
        return self.run.wait()

    def _wait_for(self, each: Kill) -> bool:
        """Wait for the moment of a kill, or until it is missed; False if the run ended first."""

        def is_due() -> bool:
            return self.run.has_ended() or self._is_at(each) or self._is_missed(each)

        self._wait_until(is_due, f"{each.target} {each.moment}")
        return not self.run.has_ended()

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Polls less often than `LiveRun` does: the cores are the product's."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while not done():
            if time.monotonic() > until:
                raise TimeoutError(f"{what} did not come; last events: {self.run.events()[-3:]}")
            time.sleep(_POLL_SECONDS)

    def _is_at(self, each: Kill) -> bool:
        generation, step = newest_generation(self.run), self._steps()
        if each.moment.is_recovery:
            if generation <= self._last_kill[0] or self._first_step(generation) != step:
                return False
            if each.moment is Moment.PEER_READ:
                return bool(senders(self._moments, Wire.READ))
            phases = {phase_of(self._moments, process.pid) for process in self.run.ranks().values()}
            return _PHASES[each.moment] in phases
        if step < each.after_step or (generation, step) == self._last_kill or not self.run.ranks():
            return False
        match each.moment:
            case Moment.SAVE:
                folders = list(self.run.directory.checkpoints.glob(f"step-*.gen-{generation}"))
                return any(not (folder / MANIFEST).exists() for folder in folders)
            case Moment.COPY:
                return bool(senders(self._moments, Wire.COPY))
            case Moment.COPIED:
                return self._is_copied(generation)
        return True

    def _is_missed(self, each: Kill) -> bool:
        """Whether the moment will not come: a group trains again, or goes on, or the run is nearly over."""
        generation, step = newest_generation(self.run), self._steps()
        if not self.run.ranks():
            return False
        if not each.moment.is_recovery:
            return step >= _LAST_STEP
        if generation > self._last_kill[0]:
            return step > self._first_step(generation)
        return step > self._last_kill[1] + _STEPS_OF_LOST_GROUP

    def _is_copied(self, generation: int) -> bool:
        """Whether all nodes have sent the newest complete commit to their peers."""
        own = [name for name in committed(self.run.directory) if name.generation == generation]
        logs = self.run.directory.generation_logs(generation)
        logged = "".join(path.read_text() for path in logs.root.glob("worker-*.log"))
        return bool(own) and len(re.findall(rf"{max(own)}: \d+ bytes are copied", logged)) >= len(self.nodes.ring())

    def _inject(self, each: Kill) -> None:
        time.sleep(each.delay)
        hit = self._is_at(each)
        self._last_kill = newest_generation(self.run), self._steps()
        self.results.append(KillResult(each, self._last_kill[1], hit))
        match each.target:
            case Target.EVERYTHING:
                self.nodes.wait_until_joined()
                self.run.kill_everything()
                self._set_workers(self.schedule.world_size)
                self._start()
            case Target.DRIVER:
                self._kill_driver()
            case Target.RANK | Target.RANKS | Target.READER:
                for process in self._ranks_to_kill(each):
                    with suppress(ProcessLookupError):
                        kill(process)
            case _:
                self._kill_nodes(self._nodes_to_kill(each))

    def _kill_driver(self) -> None:
        with suppress(AssertionError, ProcessLookupError):  # there is none, because the one before was just killed
            kill(self.run.driver())

    def _kill_nodes(self, names: list[str]) -> None:
        self.nodes.wait_until_joined()
        for name in sorted(names):  # the head first, whose agent is found by the raylet that started it
            self.nodes.kill(name)
        if self.schedule.resizes:
            self._set_workers(self.nodes.slots)
        else:
            self.nodes.begin_to_join_missing()

    def _complete_nodes(self) -> None:
        """After a round, replace the nodes that were lost in it, if that has not begun."""
        if self.schedule.resizes and self.nodes.slots < self.schedule.world_size:
            self.nodes.join_missing()
            self._set_workers(self.schedule.world_size)

    def _set_workers(self, count: int) -> None:
        """Change the number of workers, as a user does."""
        if count != self._workers:
            self._workers = count
            put_job(self.run.directory, self._job(count))

    def _ranks_to_kill(self, each: Kill) -> list[Process]:
        ranks = self.run.ranks()
        if each.target is Target.RANKS:
            return list(ranks.values())
        places = self.nodes.by_rank()
        holders = {node_of(pid) for pid in senders(self._moments, Wire.READ)} if each.target is Target.READER else set()
        found = [ranks[rank] for rank, node in places.items() if node not in holders and rank in ranks]
        return found[int(each.victim * len(found)) :][:1]

    def _nodes_to_kill(self, each: Kill) -> list[str]:
        ring = self.nodes.ring()
        if each.target in (Target.SENDER, Target.RECEIVER):
            wire = Wire.READ if each.moment is Moment.PEER_READ else Wire.COPY
            sending = [node for pid in senders(self._moments, wire) if (node := node_of(pid)) is not None]
            ring = sending or ring
        if not ring:
            return []
        node = ring[int(each.victim * len(ring))]
        following = self.nodes.after(node)
        match each.target:
            case Target.HOLDERS:
                return [node] if following is None else [node, following]
            case Target.RECEIVER:
                return [node if following is None else following]
        return [node]

    def _steps(self) -> int:
        """The last step of the newest generation, which begins with those before it."""
        return max(self.run.last_step(), self._first_step(newest_generation(self.run)))

    def _first_step(self, generation: int) -> int:
        started = [event for event in self.run.events("generation-started") if event["generation"] == generation]
        return int(started[-1]["step"]) if started else 0
