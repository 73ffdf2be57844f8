"""The fault harness: a job in training, access to what a fault can hit, and the checks after every fault."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from tests.cluster.faults.status_invariants import invariant_violations
from tests.cluster.faults.timeline import Recovery, longest_gap, recovery, training_intervals
from tests.cluster.finetune_jobs import SECONDS_TO_TRAIN, RunArtifacts, RunningJob
from tests.cluster.operator_install import Operator
from tests.cluster.status_history import ObservedJob

SECONDS_TO_REPORT = 90.0
"""Seconds from the first new step until the status must report it."""


@dataclass
class InjectedFault:
    """One injected fault.

    Attributes:
        time: Unix time of the injection.
        interrupts: Whether it makes a new worker group start.
        continues: Whether the worker group continues although the head is lost.
        recovered: Unix time at which the status reported the recovery.
        longest_gap_seconds: Longest pause between two steps until then, if it continues; known at the end of the job.
        restarts: Counted restarts by cause.
    """

    time: float
    interrupts: bool
    continues: bool = False
    recovered: float = 0.0
    longest_gap_seconds: float | None = None
    restarts: dict[str, int] = field(default_factory=dict)

    def mark_injected(self) -> None:
        """Set the time of the fault to now, after preparation."""
        self.time = time.time()


@dataclass
class FaultHarness:
    """A job in training, and access to everything that a fault can hit.

    Attributes:
        cluster: The cluster of the job.
        fault: Injects faults of nodes, GPUs and the API server.
        operator: The operator of the cluster.
        job: The job.
        injected_faults: The faults injected so far.
        operator_downtime: Start and end of each time without an operator.
    """

    cluster: ClusterUnderTest
    fault: Fault
    operator: Operator
    job: RunningJob
    injected_faults: list[InjectedFault] = field(default_factory=list)
    operator_downtime: list[tuple[float, float]] = field(default_factory=list)
    _survived: dict[str, bool] = field(default_factory=dict)

    def machine(self, what: str) -> Cluster:
        """The machine that runs the cluster; skips the test on an external cluster."""
        return self.cluster.machine_for(what)

    def delete(self, pods: Iterable[dict[str, Any]], *options: str) -> None:
        """Delete pods without waiting."""
        names = [pod["metadata"]["name"] for pod in pods]
        self.job.kubectl("delete", "pods", *names, "--wait=false", *options)

    def inject_once(self, inject: Callable[["FaultHarness"], None]) -> None:
        """Inject a fault, unless the job has survived it already.

        Raises:
            AssertionError: The job does not survive it, or did not before.
        """
        name = inject.__name__
        if name not in self._survived:
            self._survived[name] = False
            inject(self)
            self._survived[name] = True
        assert self._survived[name], f"the job has not survived {name} before"

    @contextmanager
    def expect_recovery(self, *causes: str, lost_workers: int = 0, continues: bool = False) -> Iterator[InjectedFault]:
        """Wait until the job has committed; the block injects a fault; then check that training recovers.

        With causes, a new worker group must make new steps, and the status must count at least one restart, all under
        these causes. Without causes, the running group must continue and no restart is counted. With causes and
        `continues`, the group must continue without a lost step, and what is counted is the loss of the head. In all
        cases the status must become Ready, and all worker pods except `lost_workers` must be kept.
        """
        before = self._wait_for_baseline()
        uids = self.job.worker_uids()
        assert len(uids) == self.job.workers
        injected = InjectedFault(time.time(), interrupts=bool(causes) and not continues, continues=continues)
        yield injected
        if continues:
            self._wait_for_next_head(before)
        self._wait_for_new_steps(before, interrupted=injected.interrupts)
        kept = uids & self.job.worker_uids()  # now, because a short job may end before the status reports the new steps
        reported = self._wait_until_reported(before, causes)
        injected.restarts, injected.recovered = _counted(before, reported), time.time()
        assert injected.restarts.keys() <= set(causes), (
            f"counted {injected.restarts}, which was {causes or 'no restart'}"
        )
        assert bool(injected.restarts) == bool(causes)
        if continues:
            now = self.job.progress()
            assert (now["generation"], now["stepsLost"]) == (before["generation"], before["stepsLost"])
        assert len(kept) == len(uids) - lost_workers, (
            f"{len(uids) - len(kept)} worker pods were replaced, in place of {lost_workers}"
        )
        self.injected_faults.append(injected)

    @contextmanager
    def without_operator(self) -> Iterator[None]:
        """Stop the operator for the duration of the block."""
        left = time.time()
        self.operator.stop()
        try:
            yield
        finally:
            self.operator.start()
            self.operator_downtime.append((left, time.time()))

    def _wait_for_baseline(self) -> dict[str, Any]:
        """The trainer's progress after a new commit, once the status counts all restarts so far."""
        self.job.wait_for_commit(self.job.wait_for_step(1)["step"] + 1)
        now = self.job.progress()
        counted = now["restarts"]
        self.job.history.wait_for(
            "a status with the restarts so far",
            SECONDS_TO_REPORT,
            lambda seen: all(seen.status.get("restarts", {}).get(cause) == count for cause, count in counted.items()),
        )
        return now

    def _wait_for_next_head(self, before: dict[str, Any]) -> None:
        """Wait until another head reports that training goes on."""

        def is_back(found: dict[str, Any]) -> bool:
            counted = found["restarts"]["headLost"] > before["restarts"]["headLost"]
            return bool(counted and found["phase"] == "Training" and found["step"] > before["step"])

        self.job.wait_for_progress("training under another head", is_back)

    def _wait_for_new_steps(self, before: dict[str, Any], *, interrupted: bool) -> None:
        """Wait for a step beyond those before the fault, by a new worker group if `interrupted`, else by the same."""
        generation = before["generation"] + (1 if interrupted else 0)
        now = self.job.wait_for_step(before["step"] + 1, generation)
        if not interrupted:
            assert now["generation"] == before["generation"], "the worker group was started again"

    def _wait_until_reported(self, before: dict[str, Any], causes: tuple[str, ...]) -> ObservedJob:
        def is_reported(seen: ObservedJob) -> bool:
            is_of_now = seen.status["highestStep"] > before["step"]
            return is_of_now and seen.holds("Ready") and bool(_counted(before, seen)) == bool(causes)

        return self.job.history.wait_for("Ready again", SECONDS_TO_REPORT, is_reported, since=time.time())

    def verify_outcome(self, undisturbed: Callable[[int], RunArtifacts], folder: Path) -> list[Recovery | None]:
        """Wait for the end; check that the model equals that of an undisturbed run and that every status was correct.

        Args:
            undisturbed: Returns the artifacts of an undisturbed run with that number of steps.
            folder: Destination for a copy of this job's artifacts.

        Returns:
            The recovery after each injected fault; None if the fault interrupts nothing.
        """
        ended = self.job.wait_until_complete(SECONDS_TO_TRAIN)
        artifacts = self.job.artifacts(folder)
        counted = sum(sum(injected.restarts.values()) for injected in self.injected_faults)
        assert ended.status["restarts"]["total"] == counted, ended.status["restarts"]
        self.assert_status_invariants(artifacts)
        for injected in self.injected_faults:
            if injected.continues:
                gap = longest_gap(artifacts, injected.time, injected.recovered)
                injected.longest_gap_seconds = round(gap, 1)
        reference = undisturbed(ended.status["totalSteps"])
        assert artifacts.samples() == reference.samples(), "the steps trained on other rows than the undisturbed run"
        assert artifacts.sha256() == reference.sha256(), "the weights differ from those of the undisturbed run"
        return [
            recovery(artifacts, injected.time) if injected.interrupts else None for injected in self.injected_faults
        ]

    def assert_status_invariants(self, artifacts: RunArtifacts) -> None:
        """Raise AssertionError if a status so far violates an invariant."""
        found = invariant_violations(self.job.history.seen, training_intervals(artifacts), self.operator_downtime)
        assert not found, "the status violated its invariants:\n" + "\n".join(found)


def _counted(before: dict[str, Any], seen: ObservedJob) -> dict[str, int]:
    """Restarts that the status has counted since, by cause."""
    now = seen.status["restarts"]
    return {cause: now[cause] - count for cause, count in before["restarts"].items() if now[cause] > count}
