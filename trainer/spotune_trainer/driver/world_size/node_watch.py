"""Watches the nodes while a worker group trains, and makes the group yield when they change.

A thread of the driver. It writes a notice to the generation's folder if the node of a worker is draining or, at most
once per `workers.resizeCooldown`, if a larger group is possible. `resizing.py` decides when the group is to leave. With
`workers.onStraggler: replace` it also leaves the node of a straggler (`fitness/straggler_replacement.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import ray

from spotune.errors import SpotuneError
from spotune.job import FinetuneJob, WorkersSpec
from spotune.resize.growing import Grow
from spotune.resize.leaving import LeaveDecision
from spotune_trainer.driver.world_size.resizing import STEADY_SECONDS, Resizing
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.worker_group.fitness.straggler_replacement import StragglerReplacement
from spotune_trainer.worker_group.result import NodeAgents, Slots

logger = logging.getLogger("spotune.driver")

_CHECK_SECONDS = 1.0
_DECIDE_AGAIN_SECONDS = 5.0
"""How often a larger group of the same size is decided on anew, after it was postponed."""


class NodeWatch:
    """Watches the nodes of one generation; a context manager around its worker group.

    Args:
        resizing: decides for the group.
        job: returns the job as it is now.
        agents: on the nodes of the cluster.
        record: called with the name and the values of events for the ledger.
        clock: seconds, monotonic.

    Attributes:
        world_size: workers of the group.
        yield_reason: why the group is to yield, for messages; None if it is not.
        preempted: whether that is because a node is draining.
        decision: about the draining nodes; None before there are any.
        deadline: when the node may be lost, in seconds since the epoch; None: not known.
    """

    def __init__(
        self,
        resizing: Resizing,
        job: Callable[[], FinetuneJob],
        agents: NodeAgents,
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resizing = resizing
        self.world_size = resizing.group.world_size
        self._job = job
        self._agents = agents
        self._record = record
        self._clock = clock
        group = resizing.group
        self._stragglers = StragglerReplacement(
            group.logs, group.planned_minimum, resizing.ledger, agents.leave_out, clock
        )
        self._started = clock()
        self._slots_since: float | None = None
        self._noticed: set[str] = set()
        self._postponed: Grow | None = None
        self._decided: tuple[int, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self.yield_reason: str | None = None
        self.preempted = False
        self.decision: LeaveDecision | None = None
        self.deadline: float | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Make the group yield if there is a reason to. A draining node takes precedence over a larger group."""
        draining = self._agents.draining()
        going = {node: draining[node] for node in self._agents.occupied() if node in draining}
        workers = self._job().spec.workers
        slots = self._agents.ensure(workers.gpus > 0)
        self._resizing.observe(slots, workers, self._clock())
        if going.keys() - self._noticed:
            self._yield_before(going, slots, workers)
        elif self.yield_reason is None:
            if (reason := self._stragglers.reason(self._resizing.group.generation, workers)) is not None:
                self._yield(reason, {}, {})
            else:
                self._grow(slots, workers)

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_SECONDS):
            try:
                self.check()
            except (OSError, ray.exceptions.RayError, RuntimeError) as error:  # a full volume, a dying head
                logger.debug("the nodes could not be checked: %s", error)
            except (SpotuneError, ValueError) as error:  # the job file is not readable
                logger.warning("the nodes could not be checked: %s", error)
            except Exception:  # a bug in one check must not end those of the whole run
                logger.exception("the nodes could not be checked, because of a bug of spotune")

    def _yield_before(self, going: Mapping[str, float], slots: Slots, workers: WorkersSpec) -> None:
        deadlines = [deadline for deadline in going.values() if deadline > 0]
        self.deadline = min(deadlines, default=None)
        seconds = self.deadline - time.time() if self.deadline is not None else None
        if workers.world_size < self.world_size:
            reason = f"the job asks for {workers.world_size} workers now, {self.world_size} train"
            self._yield(reason, {}, going, leave_within=seconds)
            return
        decision, values = self._resizing.on_notice(slots, seconds, workers, self._clock())
        self.preempted, self.decision = True, decision
        leave_within = None if decision.leave_after_seconds == 0.0 else seconds
        self._yield(f"{len(going)} node(s) of the workers are draining", values, going, leave_within=leave_within)

    def _grow(self, slots: Slots, workers: WorkersSpec) -> None:
        """Yield to a larger group if it pays, its slots have existed for a while, and the cooldown has passed."""
        size, now = min(slots.imported, workers.world_size), self._clock()
        if size <= self.world_size:
            self._slots_since = None
            return
        if self._slots_since is None:
            self._slots_since = now
        if now - self._slots_since < STEADY_SECONDS or now - self._started < workers.resize_cooldown.seconds:
            return
        if self._decided is not None and self._decided[0] == size and now - self._decided[1] < _DECIDE_AGAIN_SECONDS:
            return
        self._decided = size, now
        reason = f"there are slots for {size} workers, {self.world_size} train"
        decision, values = self._resizing.on_more_slots(slots, workers, now)
        if decision.choice is Grow.GROW:
            self._yield(reason, values, {}, commit_within=decision.commit_within_seconds)
        elif decision.choice is not self._postponed:
            self._postponed = decision.choice
            logger.info("%s: %s", reason, decision.reason)
            self._record("growth-postponed", reason=reason, **values)

    def _yield(
        self,
        reason: str,
        values: Mapping[str, Any],
        going: Mapping[str, float],
        *,
        leave_within: float | None = None,
        commit_within: float = 0.0,
    ) -> None:
        """Write the notice, and record it.

        Args:
            reason: for the group to yield.
            values: of the decision.
            going: nodes that may be lost.
            leave_within: seconds until which the group may train on; None: it leaves at once.
            commit_within: how long a group that leaves at once may wait for a commit that is due, in seconds.
        """
        logs = self._resizing.group.logs
        write_notice(logs.notice, seconds=leave_within, reason=reason, leave=True, commit_within_seconds=commit_within)
        self._noticed |= going.keys()
        self.yield_reason = reason
        seconds = round(self.deadline - time.time(), 1) if self.deadline is not None else None
        within = f" within {seconds:.0f} s" if seconds is not None else ""
        logger.info("%s: the group is to yield%s. %s", reason, within, values.get("why", ""))
        self._record("leaving", reason=reason, seconds=seconds, **values)
