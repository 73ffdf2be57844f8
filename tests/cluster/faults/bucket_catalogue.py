"""The faults of `make bucket-faults`: they hit jobs whose only storage is a bucket."""

import time

from tests.cluster.bucket_jobs import BucketWorkplace
from tests.cluster.faults import nodes, pods, processes
from tests.cluster.faults.catalogue import Case
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.finetune_jobs import STEPS

SECONDS_UNREACHABLE = 150.0
TWO_WRITERS = "another job takes over the bucket"

_SHORT = {"training": {"maxSteps": 2 * STEPS}}
_WORKERS_KEPT = "worker pods kept"
_GROUP_KEPT = "worker group not started again, no step lost"


def bucket_unreachable_for_minutes(harness: FaultHarness) -> None:
    """Commits wait, and training goes on."""
    workplace = harness.job.workplace
    assert isinstance(workplace, BucketWorkplace)
    with harness.expect_recovery() as injected:
        before = harness.job.history.last.status["highestStep"]
        harness.fault.cut(workplace.service)
        time.sleep(SECONDS_UNREACHABLE)
        meanwhile = [seen for seen in harness.job.history.seen if seen.time > injected.time]
        harness.fault.restore(workplace.service)
        assert meanwhile[-1].status["highestStep"] > before, "training stopped while the bucket could not be reached"
        reported = [seen.condition("CheckpointHealthy") for seen in meanwhile]
        assert any(found.get("reason") == "CommitFails" for found in reported), reported[-1]
        harness.job.wait_for_commit(meanwhile[-1].status["highestStep"])


BUCKET_CASES = (
    Case(
        "bucket unreachable for two and a half minutes",
        bucket_unreachable_for_minutes,
        f"{_WORKERS_KEPT}, worker group not started again, steps go on, `CheckpointHealthy` False meanwhile",
        endless=True,
    ),
    Case("every pod at once", pods.every_pod_gone_at_once, "goes on from the last commit in the bucket", _SHORT),
    Case("head pod deleted", pods.head_pod_deleted, _GROUP_KEPT, endless=True),
    Case("head pod deleted by force", pods.head_pod_deleted_by_force, _GROUP_KEPT, endless=True),
    Case("head and one worker at once", pods.head_and_one_worker_deleted_at_once, "the other worker pod kept", _SHORT),
    Case("node of a worker crashed", nodes.node_of_a_worker_crashed, "the other worker pod kept", _SHORT),
    Case(
        "node of the head crashed",
        nodes.node_of_the_head_crashed,
        f"{_GROUP_KEPT}; the operator is lost with it",
        endless=True,
    ),
    Case("worker pod deleted", pods.worker_pod_deleted, "the other worker pod kept", _SHORT),
    Case("worker process `kill -9`", processes.worker_process_killed, _WORKERS_KEPT, _SHORT),
)
"""In the order of docs/bucket-faults.md, whose last row is `TWO_WRITERS`."""
