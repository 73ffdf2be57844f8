"""What becomes of the nodes while a worker group trains: some are announced to go, and there may be room for more.

A thread of the driver. It tells the group to leave by a notice in the generation's folder: before the node of one of
its workers is gone, or, not more often than `workers.resizeCooldown`, for a larger group.
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

_LOOK_EVERY_SECONDS = 1.0
_STEADY_SECONDS = 10.0
"""So long must there be room for more workers before a group leaves for it."""


class NodeWatch:
    """Watches over the nodes of one generation; a context manager around its worker group.

    Args:
        logs: the generation's folder.
        world_size: its workers.
        job: the job as it is by now.
        agents: those on the cluster's nodes.
        say: told `reason` and `seconds` (None: no deadline) once the group is to leave.
        clock: seconds, monotonic.

    Attributes:
        leaving_for: why the group was told to leave, for people; None while it was not.
        preempted: whether that was because a node is going away.
    """

    def __init__(
        self,
        logs: GenerationLogs,
        world_size: int,
        job: Callable[[], FinetuneJob],
        agents: NodeAgents,
        say: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._world_size = world_size
        self._job = job
        self._agents = agents
        self._say = say
        self._clock = clock
        self._started = clock()
        self._room_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self.leaving_for: str | None = None
        self.preempted = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Tell the group to leave if there is a reason to by now; a deadline comes before room for more."""
        draining = self._agents.draining()
        ours = {node: draining[node] for node in self._agents.occupied() if node in draining}
        if ours and not self.preempted:
            self._leave_until(ours, self._job().spec.workers)
        elif self.leaving_for is None:
            workers = self._job().spec.workers
            self._grow(self._agents.muster(workers.gpus > 0).ready, workers)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_SECONDS):
            try:
                self.look()
            except (OSError, ray.exceptions.RayError, RuntimeError) as error:  # a full volume, a head that is going
                logger.debug("the nodes could not be looked at: %s", error)

    def _leave_until(self, going: Mapping[str, float], workers: WorkersSpec) -> None:
        deadlines = [deadline for deadline in going.values() if deadline > 0]
        seconds = min(deadlines) - time.time() if deadlines else None
        reason = f"{len(going)} node(s) of the workers are being taken away"
        if workers.world_size < self._world_size:
            reason = "fewer workers are wanted"
        else:
            self.preempted = True
        self._leave(reason, seconds)

    def _grow(self, slots: int, workers: WorkersSpec) -> None:
        """Leave for more workers once their nodes have been there for a while, and so has this group."""
        size, now = min(slots, workers.world_size), self._clock()
        if size <= self._world_size:
            self._room_since = None
            return
        if self._room_since is None:
            self._room_since = now
        cooldown = workers.resize_cooldown.seconds
        if now - self._room_since < _STEADY_SECONDS or now - self._started < cooldown:
            return
        self._leave(f"there is room for {size} workers, {self._world_size} train", None)

    def _leave(self, reason: str, seconds: float | None) -> None:
        write_notice(self._logs.notice, seconds=seconds, reason=reason, leave=True)
        self.leaving_for = reason
        logger.info("%s: the group is to leave%s", reason, f" within {seconds:.0f} s" if seconds is not None else "")
        self._say(reason=reason, seconds=round(seconds, 1) if seconds is not None else None)
