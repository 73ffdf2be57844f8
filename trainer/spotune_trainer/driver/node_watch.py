"""Watches the nodes while a worker group trains, and makes the group yield when they change.

A thread of the driver. It writes a notice to the generation's folder if the node of a worker is draining or, at most
once per `workers.resizeCooldown`, if a larger group is possible.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

import ray

from spotune.job import FinetuneJob, WorkersSpec
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.worker_group.result import NodeAgents

logger = logging.getLogger("spotune.driver")

_CHECK_SECONDS = 1.0
_STEADY_SECONDS = 10.0
"""How long slots for more workers must exist before the group yields to a larger one."""


class NodeWatch:
    """Watches the nodes of one generation; a context manager around its worker group.

    Args:
        logs: the generation's folder.
        world_size: its workers.
        job: returns the job as it is now.
        agents: on the nodes of the cluster.
        on_yield: called with `reason` and `seconds` (None: no deadline) once the group is to yield.
        clock: seconds, monotonic.

    Attributes:
        yield_reason: why the group is to yield, for messages; None if it is not.
        preempted: whether that is because a node is draining.
    """

    def __init__(
        self,
        logs: GenerationLogs,
        world_size: int,
        job: Callable[[], FinetuneJob],
        agents: NodeAgents,
        on_yield: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._world_size = world_size
        self._job = job
        self._agents = agents
        self._on_yield = on_yield
        self._clock = clock
        self._started = clock()
        self._slots_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self.yield_reason: str | None = None
        self.preempted = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Make the group yield if there is a reason to. A draining node takes precedence over a larger group."""
        draining = self._agents.draining()
        ours = {node: draining[node] for node in self._agents.occupied() if node in draining}
        if ours and not self.preempted:
            self._yield_before(ours, self._job().spec.workers)
        elif self.yield_reason is None:
            workers = self._job().spec.workers
            self._grow(self._agents.ensure(workers.gpus > 0).ready, workers)

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_SECONDS):
            try:
                self.check()
            except (OSError, ray.exceptions.RayError, RuntimeError) as error:  # a full volume, a dying head
                logger.debug("the nodes could not be checked: %s", error)

    def _yield_before(self, going: Mapping[str, float], workers: WorkersSpec) -> None:
        deadlines = [deadline for deadline in going.values() if deadline > 0]
        seconds = min(deadlines) - time.time() if deadlines else None
        reason = f"{len(going)} node(s) of the workers are draining"
        if workers.world_size < self._world_size:
            reason = "fewer workers are requested"
        else:
            self.preempted = True
        self._yield(reason, seconds)

    def _grow(self, slots: int, workers: WorkersSpec) -> None:
        """Yield to a larger group once its slots have existed for a while, and this group has run for the cooldown."""
        size, now = min(slots, workers.world_size), self._clock()
        if size <= self._world_size:
            self._slots_since = None
            return
        if self._slots_since is None:
            self._slots_since = now
        cooldown = workers.resize_cooldown.seconds
        if now - self._slots_since < _STEADY_SECONDS or now - self._started < cooldown:
            return
        self._yield(f"there are slots for {size} workers, {self._world_size} train", None)

    def _yield(self, reason: str, seconds: float | None) -> None:
        write_notice(self._logs.notice, seconds=seconds, reason=reason, leave=True)
        self.yield_reason = reason
        logger.info("%s: the group is to yield%s", reason, f" within {seconds:.0f} s" if seconds is not None else "")
        self._on_yield(reason=reason, seconds=round(seconds, 1) if seconds is not None else None)
