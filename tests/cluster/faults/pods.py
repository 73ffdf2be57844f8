"""Faults of pods: deletion, graceful or forced."""

import time

from tests.cluster.faults.harness import FaultHarness
from tests.cluster.faults.processes import signal_worker

_LONG_STEP_SECONDS = 12.0
"""Raylets give up a lost GCS after 5 s, and end: ranks have to live without them."""


def worker_pod_deleted(harness: FaultHarness) -> None:
    with harness.expect_recovery("workerLost", "preempted", lost_workers=1):
        harness.delete(harness.job.pods("workers")[:1])


def head_pod_deleted(harness: FaultHarness) -> None:
    """The workers commit and train on, and the next head continues with them."""
    with harness.expect_recovery("headLost", continues=True):
        harness.delete([harness.job.head()])


def head_pod_deleted_by_force(harness: FaultHarness) -> None:
    """The same without time for a commit."""
    with harness.expect_recovery("headLost", continues=True):
        harness.delete([harness.job.head()], "--force", "--grace-period=0")


def head_pod_deleted_in_a_long_step(harness: FaultHarness) -> None:
    """A step lasts longer than raylets live without a GCS: a rank is paused meanwhile."""
    with harness.expect_recovery("headLost", continues=True):
        committed = harness.job.progress()
        harness.job.wait_for_step(committed["step"] + 1)  # there is something to lose
        signal_worker(harness, "STOP")
        harness.delete([harness.job.head()])
        time.sleep(_LONG_STEP_SECONDS)
        signal_worker(harness, "CONT")


def head_and_one_worker_deleted_at_once(harness: FaultHarness) -> None:
    with harness.expect_recovery("headLost", "workerLost", "preempted", lost_workers=1):
        harness.delete([harness.job.head(), *harness.job.pods("workers")[:1]])


def every_pod_gone_at_once(harness: FaultHarness) -> None:
    with harness.expect_recovery("headLost", "workerLost", lost_workers=harness.job.workers):
        harness.delete([harness.job.head(), *harness.job.pods("workers")], "--force", "--grace-period=0")
