"""A job in training, everything that a fault can be done to, and what must hold after every fault."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from tests.cluster.faults.status_invariants import untruths
from tests.cluster.faults.timeline import Recovery, recovery, stretches
from tests.cluster.finetune_jobs import SECONDS_TO_TRAIN, Remains, RunningJob
from tests.cluster.operator_install import Operator
from tests.cluster.status_history import Seen

SECONDS_TO_BE_TOLD = 90.0
"""From the first new step to a status that says so."""


@dataclass
class Strike:
    """One fault that was brought about.

    Attributes:
        time: When.
        interrupts: Whether a worker group had to be started because of it.
        restarts: How often each cause was counted for it.
    """

    time: float
    interrupts: bool
    restarts: dict[str, int] = field(default_factory=dict)

    def falls_now(self) -> None:
        """What came before was preparation."""
        self.time = time.time()


@dataclass
class Scene:
    """A job, and what faults are done with.

    Attributes:
        cluster: That the job is on.
        fault: The faults of the machine below.
        operator: The operator that looks after the job.
        job: The job.
        strikes: What was done to it so far.
        unattended: From when until when there was no operator.
    """

    cluster: ClusterUnderTest
    fault: Fault
    operator: Operator
    job: RunningJob
    strikes: list[Strike] = field(default_factory=list)
    unattended: list[tuple[float, float]] = field(default_factory=list)

    def machine(self, what: str) -> Cluster:
        """The machine below the cluster; skips the test where it is somebody else's."""
        return self.cluster.machine_for(what)

    def delete(self, pods: Iterable[dict[str, Any]], *options: str) -> None:
        """Delete pods, without waiting for their end."""
        names = [pod["metadata"]["name"] for pod in pods]
        self.job.kubectl("delete", "pods", *names, "--wait=false", *options)

    @contextmanager
    def survives(self, *causes: str, loses: int = 0) -> Iterator[Strike]:
        """The job trains, and has committed; the block does something to it; and it goes on as promised.

        With causes, a new worker group makes new steps, each restart is counted in the status under one of them, and
        at least one is. Without, the running one goes on, and nothing is counted. In both cases the status comes to
        say that the job is Ready, and all worker pods but `loses` are those of before.
        """
        before = self._training()
        uids = self.job.worker_uids()
        assert len(uids) == self.job.workers
        strike = Strike(time.time(), interrupts=bool(causes))
        yield strike
        self._wait_for_new_steps(before, interrupted=bool(causes))
        told = self._wait_until_told(before, causes)
        strike.restarts = _counted(before, told)
        assert strike.restarts.keys() <= set(causes), f"counted {strike.restarts}, which was {causes or 'no restart'}"
        assert bool(strike.restarts) == bool(causes)
        kept = uids & self.job.worker_uids()
        assert len(kept) == len(uids) - loses, f"{len(uids) - len(kept)} worker pods were replaced, in place of {loses}"
        self.strikes.append(strike)

    @contextmanager
    def without_operator(self) -> Iterator[None]:
        """There is no operator until the block ends."""
        left = time.time()
        self.operator.stop()
        try:
            yield
        finally:
            self.operator.start()
            self.unattended.append((left, time.time()))

    @contextmanager
    def starts_anew(self) -> Iterator[None]:
        """The job trains; the block ends its pods in order; and it goes on with others, without a restart counted."""
        before = self._training()
        yield
        self._wait_for_new_steps(before, interrupted=True)
        self._wait_until_told(before, ())

    def _training(self) -> dict[str, Any]:
        """What the trainer says as soon as it has committed anew, and the status has taken in all restarts so far."""
        self.job.wait_for_commit(self.job.wait_for_step(1)["step"] + 1)
        now = self.job.progress()
        counted = now["restarts"]
        self.job.history.wait_for(
            "a status with the restarts so far",
            SECONDS_TO_BE_TOLD,
            lambda seen: all(seen.status.get("restarts", {}).get(cause) == count for cause, count in counted.items()),
        )
        return now

    def _wait_for_new_steps(self, before: dict[str, Any], *, interrupted: bool) -> None:
        """Steps that nobody had made when the fault came, by a worker group after, or not after, that of then."""
        generation = before["generation"] + (1 if interrupted else 0)
        now = self.job.wait_for_step(before["step"] + 1, generation)
        if not interrupted:
            assert now["generation"] == before["generation"], "the worker group was started again"

    def _wait_until_told(self, before: dict[str, Any], causes: tuple[str, ...]) -> Seen:
        def told(seen: Seen) -> bool:
            is_of_now = seen.status["highestStep"] > before["step"]
            return is_of_now and seen.holds("Ready") and bool(_counted(before, seen)) == bool(causes)

        return self.job.history.wait_for("Ready again", SECONDS_TO_BE_TOLD, told, since=time.time())

    def finish(self, undisturbed: Callable[[int], Remains], folder: Path) -> list[Recovery | None]:
        """The job ends as if nothing had been done to it, and its status has told the truth all along.

        Args:
            undisturbed: Gives what a job of so many steps leaves that nobody disturbs.
            folder: Where what this one leaves is copied to.

        Returns:
            How it went on after each strike.
        """
        ended = self.job.wait_until_complete(SECONDS_TO_TRAIN)
        remains = self.job.remains(folder)
        counted = sum(sum(strike.restarts.values()) for strike in self.strikes)
        assert ended.status["restarts"]["total"] == counted, ended.status["restarts"]
        self.refuse_untruths(remains)
        reference = undisturbed(ended.status["totalSteps"])
        assert remains.samples() == reference.samples(), "the steps went over other rows than those of the other run"
        assert remains.sha256() == reference.sha256(), "the weights are others"
        return [recovery(remains, strike.time) if strike.interrupts else None for strike in self.strikes]

    def refuse_untruths(self, remains: Remains) -> None:
        """Raise AssertionError for whatever the statuses so far said that was not so."""
        found = untruths(self.job.history.seen, stretches(remains), self.unattended)
        assert not found, "the status did not tell the truth:\n" + "\n".join(found)


def _counted(before: dict[str, Any], seen: Seen) -> dict[str, int]:
    """Restarts that a status has counted since, by their cause."""
    now = seen.status["restarts"]
    return {cause: now[cause] - count for cause, count in before["restarts"].items() if now[cause] > count}
