"""Plays a schedule on the product: `spotune run` as a process of its own, with its Ray, its driver and its workers.

Whatever is killed is killed with SIGKILL. What the kubelet does for a supervisor in a pod is done here: a command that
was killed, or left because it was told to, is started again. Nothing else is done for the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spotune.job import FinetuneJob
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.ray_head.local import mark
from spotune_trainer.supervisor.ray_head.processes import Family, Process, boot_id
from tests.proof import nodes
from tests.proof.injected.slow_volume import VOLUME, Latency, set_latency
from tests.proof.injection_points import can_be_compared, is_now, newest_generation
from tests.proof.schedules import Deed, Disturbance, Moment, Schedule
from tests.trainer.support.live import LiveRun, kill

_INSIDE = Path(__file__).parent / "inside"
_ROOT = Path(__file__).parents[2]
_PATIENCE_SECONDS = 600.0
_WHILE_GROWING = Latency(step=1.0)
"""A group leaves for a larger one after ten seconds: these are not to be all of its steps."""
_LEFT = 10
"""Exit code of a command that was told to leave."""


@dataclass(frozen=True)
class Strike:
    """A disturbance that was brought about.

    Attributes:
        generation: the newest one then.
        step: the last that it had logged.
        hit: whether its moment was still on right after it.
        seconds: since the command was first started.
    """

    disturbance: Disturbance
    generation: int
    step: int
    hit: bool
    seconds: float


class Performance:
    """One schedule played on one job directory.

    Args:
        directory: of the job; new.
        schedule: what happens.
        job: the job for a number of workers.
        environment: what the product's processes find in their environment besides.
        on_restart: called before a killed command is started again.

    Attributes:
        run: the command.
        schedule: what happens.
        strikes: what was brought about so far.
    """

    def __init__(
        self,
        directory: JobDirectory,
        schedule: Schedule,
        job: Callable[[int], FinetuneJob],
        environment: Mapping[str, str] | None = None,
        on_restart: Callable[[JobDirectory], None] = lambda _: None,
    ) -> None:
        path = os.pathsep.join(filter(None, (str(_INSIDE), str(_ROOT), os.environ.get("PYTHONPATH"))))
        variables = {"PYTHONPATH": path, VOLUME: str(directory.root), **(environment or {})}
        self.run = LiveRun(directory, job(schedule.world_size), variables, _PATIENCE_SECONDS)
        self.strikes: list[Strike] = []
        self.schedule = schedule
        self._job = job
        self._on_restart = on_restart
        self._world_size = schedule.world_size
        self._next_generation = 1
        self._nodes: dict[str, list[nodes.Node]] = {}
        self._began = time.monotonic()

    def play(self) -> tuple[int, str]:
        """Exit code and output of the command that ended by itself; the run may end before all was brought about."""
        set_latency(self.run.directory.root, Latency())
        self._began = time.monotonic()
        self.run.start()
        for disturbance in self.schedule.disturbances:
            if not self._await(disturbance):
                break
            self._strike(disturbance)
        return self.run.wait()

    def end(self) -> None:
        """Leave nothing running."""
        self.run.end()
        end_leftovers(self.run.directory)

    def _await(self, disturbance: Disturbance) -> bool:
        """Wait for the moment of a disturbance; whether it came before the run's end."""
        moment, deed = disturbance.moment, disturbance.deed
        at_step = moment in (Moment.STEP, Moment.SAVE)
        needs_rank = deed in (Deed.KILL_WORKER, Deed.KILL_WORKERS)
        changes = disturbance.world_size != self._world_size
        if changes:
            self._prepare(disturbance)

        def has_come() -> bool:
            generation = newest_generation(self.run)
            if generation < self._next_generation or (needs_rank and not self.run.ranks()):
                return False
            if at_step and self.run.last_step() < disturbance.after_step:
                return False
            return is_now(moment, self.run, generation) and not (changes and not can_be_compared(self.run))

        self.run.wait_until(lambda: self.run.has_ended() or has_come(), f"{deed} {moment}")
        return not self.run.has_ended()

    def _prepare(self, disturbance: Disturbance) -> None:
        """Have the room that the next group needs where it starts at once, on the Ray in which this one trains."""
        if disturbance.deed in (Deed.KILL_WORKER, Deed.KILL_WORKERS, Deed.KILL_DRIVER):
            number = self._next_generation
            self.run.wait_until(lambda: newest_generation(self.run) >= number, f"generation {number}")
            self._make_room(disturbance.world_size)

    def _strike(self, disturbance: Disturbance) -> None:
        time.sleep(disturbance.delay)
        generation, step = newest_generation(self.run), self.run.last_step()
        seconds = round(time.monotonic() - self._began, 1)
        self._next_generation = generation + self._ends_group(disturbance)
        hit = self._inflict(disturbance, generation)
        self._world_size = disturbance.world_size
        self.strikes.append(Strike(disturbance, generation, step, hit, seconds))

    def _ends_group(self, disturbance: Disturbance) -> bool:
        """Whether the next blow falls on a later generation. A Ray of another size than is asked for is not kept."""
        if disturbance.deed.ends_group:
            return True
        ray = self.run.ray()
        return ray is not None and ray.slots != disturbance.world_size

    def _inflict(self, disturbance: Disturbance, generation: int) -> bool:
        """Bring a disturbance about; whether its moment was on."""
        size = disturbance.world_size

        def is_on() -> bool:
            return is_now(disturbance.moment, self.run, generation)

        match disturbance.deed:
            case Deed.KILL_WORKER | Deed.KILL_WORKERS | Deed.KILL_DRIVER:
                self._want(size)
                on = is_on()
                for victim in self._victims(disturbance):
                    with suppress(ProcessLookupError):
                        kill(victim)
                return on and (disturbance.moment is Moment.RESTORE or is_on())
            case Deed.KILL_RAY:
                return self._kill_ray(size, is_on)
            case Deed.GROW:
                return self._grow(size)
            case Deed.LOSE_NODE:
                return self._lose_node(size)
        on = is_on()
        self.run.job = self._job(size)
        match disturbance.deed:
            case Deed.KILL_SUPERVISOR:
                self.run.kill_supervisor()
            case Deed.KILL_EVERYTHING:
                self.run.kill_everything()
            case Deed.NOTICE:
                self.run.tell_to_leave()
                code, output = self.run.wait()
                assert code == _LEFT, f"told to leave, it ended with {code}: {output}"
        self._on_restart(self.run.directory)
        self.run.start()
        return on

    def _victims(self, disturbance: Disturbance) -> list[Process]:
        if disturbance.deed is Deed.KILL_DRIVER:
            return [self.run.driver()]
        ranks = [process for _, process in sorted(self.run.ranks().items())]
        if disturbance.deed is Deed.KILL_WORKERS:
            return ranks
        return ranks[int(disturbance.victim * len(ranks)) :][:1]

    def _kill_ray(self, size: int, is_on: Callable[[], bool]) -> bool:
        """Ray's head comes back with as many slots as the command was started for; a node joins for the rest."""
        self._want(size)
        on, before = is_on(), self.run.ray()
        assert before is not None
        self.run.kill_ray()

        def is_back() -> bool:
            ray = self.run.ray()
            return ray is not None and ray.address != before.address and ray.is_alive()

        self.run.wait_until(is_back, "another Ray")
        self._make_room(size)
        return on

    def _grow(self, size: int) -> bool:
        set_latency(self.run.directory.root, _WHILE_GROWING)
        self._make_room(size)
        self._want(size)
        self._wait_for_group_of(size)
        set_latency(self.run.directory.root, Latency())
        return True

    def _lose_node(self, size: int) -> bool:
        """Fewer workers come back than are wanted; after that they are wanted no more."""
        ray = self.run.ray()
        assert ray is not None
        self._nodes[ray.address].pop().kill()
        self._wait_for_group_of(size)
        self._want(size)
        return True

    def _wait_for_group_of(self, size: int) -> None:
        def has_started() -> bool:
            return bool(self.run.events("generation-started")[-1]["worldSize"] == size)

        self.run.wait_until(has_started, f"a group of {size} workers")

    def _want(self, size: int) -> None:
        """Ask for so many workers from the next group on, as a user does."""
        if size != self._world_size:
            self.run.job = self._job(size)
            put_job(self.run.directory, self.run.job)

    def _make_room(self, size: int) -> None:
        ray = self.run.ray()
        assert ray is not None
        joined = self._nodes.setdefault(ray.address, [])
        room = ray.slots + sum(node.slots for node in joined)
        if size > room:
            joined.append(nodes.join(ray, size - room, len(joined)))


def end_leftovers(directory: JobDirectory) -> None:
    """End whatever still runs of a run, however it was left."""
    Family(None, boot_id(), mark(directory.root)).end()
