"""Faults of pods: deletion, graceful or forced."""

from tests.cluster.faults.harness import FaultHarness


def worker_pod_deleted(harness: FaultHarness) -> None:
    with harness.expect_recovery("workerLost", "preempted", lost_workers=1):
        harness.delete(harness.job.pods("workers")[:1])


def head_pod_deleted(harness: FaultHarness) -> None:
    """The workers commit before Ray ends, so no step is repeated."""
    lost = harness.job.progress()["stepsLost"]
    with harness.expect_recovery("headLost"):
        harness.delete([harness.job.head()])
    assert harness.job.progress()["stepsLost"] == lost, "steps were lost, although the head had time for a commit"


def head_and_one_worker_deleted_at_once(harness: FaultHarness) -> None:
    with harness.expect_recovery("headLost", "workerLost", "preempted", lost_workers=1):
        harness.delete([harness.job.head(), *harness.job.pods("workers")[:1]])


def every_pod_gone_at_once(harness: FaultHarness) -> None:
    with harness.expect_recovery("headLost", "workerLost", lost_workers=harness.job.workers):
        harness.delete([harness.job.head(), *harness.job.pods("workers")], "--force", "--grace-period=0")
