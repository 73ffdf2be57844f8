"""Injects a schedule of faults: each in a thread of its own, so that they overlap, and all of them are undone."""

from __future__ import annotations

import logging
import math
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from spotune_testcluster import faults as network_faults
from spotune_testcluster.errors import ClusterError
from spotune_testcluster.volumes import VolumeState, set_state
from spotune_testcluster.waiting import wait_for
from tests.cluster.chaos import cluster_faults, object_faults, service_faults, workload_faults
from tests.cluster.chaos.records import InjectedFault
from tests.cluster.chaos.schedule import ChaosSchedule, PlannedFault
from tests.cluster.chaos.target import Injection, Target
from tests.cluster.finetune_jobs import WORKERS

logger = logging.getLogger("spotune.chaos")

INJECT = {**workload_faults.FAULTS, **cluster_faults.FAULTS, **object_faults.FAULTS, **service_faults.FAULTS}
_SECONDS_TO_FIND_A_TARGET = 30.0
_SECONDS_TO_UNDO = 240.0
_SECONDS_UNTIL_THE_OPERATOR_IS_BACK = 300.0
_FAILURES = (ClusterError, subprocess.SubprocessError, OSError)


@dataclass
class Injector:
    """Injects faults into jobs and a service.

    Attributes:
        targets: what they hit, one for each job.
        injected: all faults that are over, with what they hit.
        operator_downtime: start and end of each time in which the operator did not run, or could not see anything.
        findings: faults that could not be undone, and an operator that did not come back.
    """

    targets: Sequence[Target]
    injected: list[InjectedFault] = field(default_factory=list)
    operator_downtime: list[tuple[float, float]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def _shared(self) -> Target:
        """For what all jobs share."""
        return self.targets[0]

    def play(self, schedule: ChaosSchedule) -> None:
        """Inject all faults of a schedule; returns once they are over and undone."""
        start = time.time()
        with ThreadPoolExecutor(max(len(schedule.faults), 1)) as pool:
            running = [pool.submit(self._play_one, start, fault) for fault in schedule.faults]
            try:
                wait(running)
            except BaseException:
                self._stopped.set()
                raise
        for fault, future in zip(schedule.faults, running, strict=True):
            if (error := future.exception()) is not None:
                self.findings.append(f"{fault.kind} could not be injected: {_message(error)}")
        self.injected.sort(key=lambda fault: fault.at)
        self._mend()

    def _play_one(self, start: float, fault: PlannedFault) -> None:
        if self._stopped.wait(max(0.0, start + fault.at - time.time())):
            return
        begin = time.time()
        injection, problem = self._inject(fault)
        at = round(time.time() - start, 1)
        if injection is None:
            logger.info("%6.1f s: %s: nothing to hit: %s", at, fault.kind, problem)
            self.injected.append(InjectedFault(fault.kind, at, "", 0.0, problem, fault.job))
            return
        logger.info("%6.1f s: %s: %s", at, fault.kind, injection.what)
        if not injection.is_over:
            time.sleep(fault.seconds)
            self._retry(f"{fault.kind} could not be undone", injection.undo)
        if injection.operator_is_blind:
            self.operator_downtime.append((begin, time.time()))
        seconds = 0.0 if injection.is_over else round(time.time() - start - at, 1)
        self.injected.append(InjectedFault(fault.kind, at, injection.what, seconds, "", fault.job))
        if injection.operator_restarts:
            self._wait_for_operator(begin)

    def _inject(self, fault: PlannedFault) -> tuple[Injection | None, str]:
        """Inject a fault as soon as there is something to hit. Returns the reason if there is nothing for too long."""
        deadline = time.monotonic() + _SECONDS_TO_FIND_A_TARGET
        while True:
            try:
                return INJECT[fault.kind](self.targets[fault.job], fault), ""
            except _FAILURES as error:
                problem = _message(error)
            if time.monotonic() > deadline:
                return None, problem
            time.sleep(1.0)

    def _wait_for_operator(self, begin: float) -> None:
        """Wait for an operator whose process has started since; it did not see anything meanwhile."""

        def is_back() -> bool:
            try:
                return any(_has_started(pod, math.floor(begin)) for pod in self._shared.operator.pods())
            except _FAILURES:
                return False

        try:
            wait_for("the operator", _SECONDS_UNTIL_THE_OPERATOR_IS_BACK, is_back, every=1.0)
        except ClusterError:
            limit = f"{_SECONDS_UNTIL_THE_OPERATOR_IS_BACK:.0f} s"
            self.findings.append(f"the operator was not back within {limit}")
        self.operator_downtime.append((begin, time.time()))

    def _mend(self) -> None:
        """Bring back everything that a fault has taken away; most of it is there already."""
        shared, machine = self._shared, self._shared.machine
        shared.volume.thaw()
        for component in machine.components():
            self._retry(f"{component} was not started", partial(_start, shared, component))
        for node, is_running in machine.nodes().items():
            if not is_running:
                self._retry(f"{node} was not started", partial(machine.start_node, node))
            self._retry(f"{node} was not uncordoned", partial(shared.job.kubectl, "uncordon", node))
        self._retry("the volume is not normal", lambda: _restore_volume(shared))
        self._retry("the services are cut off", lambda: network_faults.restore_services(machine))
        self._retry("the operator was not started", shared.operator.start)
        spec = {"suspend": False, "workers": {"count": WORKERS}}
        for target in self.targets:
            self._retry("a job was not resumed", partial(target.job.patch, spec))

    def _retry(self, problem: str, do: Callable[[], Any]) -> None:
        """Do something again until it works; a finding if it does not."""
        deadline = time.monotonic() + _SECONDS_TO_UNDO
        while True:
            try:
                do()
            except _FAILURES as error:
                if time.monotonic() > deadline:
                    self.findings.append(f"{problem}: {_message(error)}")
                    return
                time.sleep(1.0)
            else:
                return


def _message(error: BaseException) -> str:
    """The last line of an error's message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:300]}"


def _has_started(pod: dict[str, Any], since: float) -> bool:
    """Whether the container of a pod has started since, and is ready."""
    for status in pod["status"].get("containerStatuses", []):
        started = status["state"].get("running", {}).get("startedAt")
        if status["ready"] and started and datetime.fromisoformat(started).timestamp() >= since:
            return True
    return False


def _start(target: Target, component: str) -> None:
    target.machine.component("continue", component)
    target.machine.component("start", component)


def _restore_volume(target: Target) -> None:
    target.volume.empty()
    set_state(target.machine, target.volume.volume, VolumeState.NORMAL)
