"""Injects the faults of a schedule into the product: `spotune run` as its own process, with Ray, driver and workers.

All kills are SIGKILL. Like the kubelet, the injector restarts a command that was killed or that exited after a
termination notice. Nothing else helps the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

from spotune.job import FinetuneJob
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.ray_head.local import process_marker
from spotune_trainer.supervisor.ray_head.processes import Process, ProcessFamily, boot_id
from tests.proof import nodes
from tests.proof.injected import injected_path
from tests.proof.injected.slow_volume import VOLUME, Latency, set_latency
from tests.proof.injection_points import has_comparable_steps, is_at, newest_generation
from tests.proof.schedules import Fault, FaultKind, InjectionPoint, Schedule
from tests.trainer.support.live import LiveRun, held_segments, kill

_PATIENCE_SECONDS = 600.0
_WHILE_GROWING = Latency(step=1.0)
"""Slows the group down: it yields to a larger group after ten seconds, and must have steps left by then."""
_TERMINATED = 10
"""Exit code of a command after a termination notice."""


@dataclass(frozen=True)
class Injection:
    """A fault that was injected.

    Attributes:
        generation: the newest generation at that time.
        step: the last step that it had logged.
        hit: whether the run was still at the injection point right after the fault.
        seconds: time since the first start of the command.
    """

    fault: Fault
    generation: int
    step: int
    hit: bool
    seconds: float


class FaultInjector:
    """Runs one schedule in one job directory.

    Args:
        directory: a new job directory.
        schedule: the faults to inject.
        job: returns the job for a number of workers.
        environment: additional environment variables of the product's processes.
        on_restart: called before a killed command is started again.

    Attributes:
        run: the command.
        schedule: the faults to inject.
        injections: the faults injected so far.
    """

    def __init__(
        self,
        directory: JobDirectory,
        schedule: Schedule,
        job: Callable[[int], FinetuneJob],
        environment: Mapping[str, str] | None = None,
        on_restart: Callable[[JobDirectory], None] = lambda _: None,
    ) -> None:
        variables = {"PYTHONPATH": injected_path(), VOLUME: str(directory.root), **(environment or {})}
        self.run = LiveRun(directory, job(schedule.world_size), variables, _PATIENCE_SECONDS)
        self.injections: list[Injection] = []
        self.schedule = schedule
        self._job = job
        self._on_restart = on_restart
        self._world_size = schedule.world_size
        self._next_generation = 1
        self._nodes: dict[str, list[nodes.Node]] = {}
        self._began = time.monotonic()

    def execute(self) -> tuple[int, str]:
        """Run to the end; returns exit code and output of the last command. The run may end before the last fault."""
        set_latency(self.run.directory.root, Latency())
        self._began = time.monotonic()
        self.run.start()
        for fault, following in zip_longest(self.schedule.faults, self.schedule.faults[1:]):
            if not self._wait_for_point(fault):
                break
            self._inject(fault, following)
        return self.run.wait()

    def clean_up(self) -> None:
        """Kill all processes of the run."""
        self.run.clean_up()
        kill_leftovers(self.run.directory)

    def _wait_for_point(self, fault: Fault) -> bool:
        """Wait for the injection point of a fault; False if the run ended first."""
        point, kind = fault.point, fault.kind
        at_step = point in (InjectionPoint.STEP, InjectionPoint.SAVE)
        needs_rank = kind in (FaultKind.KILL_WORKER, FaultKind.KILL_WORKERS)
        changes = fault.world_size != self._world_size
        if changes:
            self._prepare_slots(fault)

        def is_reached() -> bool:
            generation = newest_generation(self.run)
            if generation < self._next_generation or (needs_rank and not self.run.ranks()):
                return False
            if kind is FaultKind.KILL_DRIVER and not self.run.has_driver():
                return False
            if at_step and self.run.last_step() < fault.after_step:
                return False
            return is_at(point, self.run, generation) and not (changes and not has_comparable_steps(self.run))

        self.run.wait_until(lambda: self.run.has_ended() or is_reached(), f"{kind} {point}")
        return not self.run.has_ended()

    def _prepare_slots(self, fault: Fault) -> None:
        """Add slots for the next group if it starts at once, on the same Ray as this one."""
        if fault.kind in (FaultKind.KILL_WORKER, FaultKind.KILL_WORKERS, FaultKind.KILL_DRIVER):
            number = self._next_generation
            self.run.wait_until(lambda: newest_generation(self.run) >= number, f"generation {number}")
            self._ensure_slots(fault.world_size)

    def _inject(self, fault: Fault, following: Fault | None) -> None:
        time.sleep(fault.delay)
        generation, step = newest_generation(self.run), self.run.last_step()
        seconds = round(time.monotonic() - self._began, 1)
        agents = self.run.agents() if self._kills_agents(fault, following) else []
        outlives = fault.kind in (FaultKind.KILL_DRIVER, FaultKind.KILL_RAY) and not agents
        self._next_generation = generation + (self._ends_group(fault) and not outlives)
        hit = self._apply(fault, generation, agents)
        self._world_size = fault.world_size
        self.injections.append(Injection(fault, generation, step, hit, seconds))

    def _kills_agents(self, fault: Fault, following: Fault | None) -> bool:
        """Whether the agents are killed with the driver, so that the next driver cannot adopt their ranks.

        Otherwise no other group would start, which the schedule needs: of another size, or for its next fault.
        """
        needs_group = following is not None and following.point in (InjectionPoint.START, InjectionPoint.RESTORE)
        changes = fault.world_size != self._world_size
        return fault.kind in (FaultKind.KILL_DRIVER, FaultKind.KILL_RAY) and (needs_group or changes)

    def _ends_group(self, fault: Fault) -> bool:
        """Whether the next fault hits a later generation. A Ray with the wrong number of slots is replaced."""
        if fault.kind.ends_group:
            return True
        ray = self.run.ray()
        return ray is not None and ray.slots != fault.world_size

    def _apply(self, fault: Fault, generation: int, agents: Sequence[Process]) -> bool:
        """Inject a fault, and kill these agents with it; returns whether the run was at its injection point."""
        size = fault.world_size

        def is_on() -> bool:
            return is_at(fault.point, self.run, generation)

        match fault.kind:
            case FaultKind.KILL_WORKER | FaultKind.KILL_WORKERS | FaultKind.KILL_DRIVER:
                self._set_desired_workers(size)
                on = is_on()
                for victim in (*self._victims(fault), *agents):
                    with suppress(ProcessLookupError):
                        kill(victim)
                return on and (fault.point is InjectionPoint.RESTORE or is_on())
            case FaultKind.KILL_RAY:
                return self._kill_ray(size, is_on, agents)
            case FaultKind.GROW:
                return self._grow(size)
            case FaultKind.LOSE_NODE:
                return self._lose_node(size)
        on = is_on()
        self.run.job = self._job(size)
        match fault.kind:
            case FaultKind.KILL_SUPERVISOR:
                self.run.kill_supervisor()
            case FaultKind.KILL_EVERYTHING:
                self.run.kill_everything()
            case FaultKind.NOTICE:
                self.run.terminate()
                code, output = self.run.wait()
                assert code == _TERMINATED, f"after a termination notice the command exited with {code}: {output}"
        self._on_restart(self.run.directory)
        self.run.start()
        return on

    def _victims(self, fault: Fault) -> list[Process]:
        if fault.kind is FaultKind.KILL_DRIVER:
            return [self.run.driver()]
        ranks = [process for _, process in sorted(self.run.ranks().items())]
        if fault.kind is FaultKind.KILL_WORKERS:
            return ranks
        return ranks[int(fault.victim * len(ranks)) :][:1]

    def _kill_ray(self, size: int, is_on: Callable[[], bool], agents: Sequence[Process]) -> bool:
        """Kill Ray's head. It restarts with the slots of the command's start; a node joins for the rest."""
        self._set_desired_workers(size)
        on, before = is_on(), self.run.ray()
        assert before is not None
        self.run.kill_ray()
        for agent in agents:
            with suppress(ProcessLookupError):
                kill(agent)

        def is_back() -> bool:
            ray = self.run.ray()
            return ray is not None and ray.address != before.address and ray.is_alive()

        self.run.wait_until(is_back, "another Ray")
        self._ensure_slots(size)
        return on

    def _grow(self, size: int) -> bool:
        set_latency(self.run.directory.root, _WHILE_GROWING)
        self._ensure_slots(size)
        self._set_desired_workers(size)
        self._wait_for_group_of(size)
        set_latency(self.run.directory.root, Latency())
        return True

    def _lose_node(self, size: int) -> bool:
        """Kill a node: a smaller group starts. Then lower the desired number of workers to match."""
        ray = self.run.ray()
        assert ray is not None
        self._nodes[ray.address].pop().kill()
        self._wait_for_group_of(size)
        self._set_desired_workers(size)
        return True

    def _wait_for_group_of(self, size: int) -> None:
        def has_started() -> bool:
            return bool(self.run.events("generation-started")[-1]["worldSize"] == size)

        self.run.wait_until(has_started, f"a group of {size} workers")

    def _set_desired_workers(self, size: int) -> None:
        """Set the number of workers from the next group on, as a user does."""
        if size != self._world_size:
            self.run.job = self._job(size)
            put_job(self.run.directory, self.run.job)

    def _ensure_slots(self, size: int) -> None:
        ray = self.run.ray()
        assert ray is not None
        joined = self._nodes.setdefault(ray.address, [])
        slots = ray.slots + sum(node.slots for node in joined)
        if size > slots:
            joined.append(nodes.join(ray, size - slots, len(joined)))


def left_behind(directory: JobDirectory) -> list[str]:
    """Findings: processes of an ended run that still have snapshots of commits in shared memory."""
    family = ProcessFamily(None, boot_id(), process_marker(directory.root))
    left = [process.pid for process in family.members() if held_segments(process)]
    return [f"shared memory is left behind by processes {left}"] if left else []


def kill_leftovers(directory: JobDirectory) -> None:
    """Kill all processes that still belong to the job directory."""
    ProcessFamily(None, boot_id(), process_marker(directory.root)).kill()
