"""A job whose only storage is a bucket is trained by `kubectl apply`, through the loss of its head."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from tests.cluster import bucket_jobs
from tests.cluster.bucket_jobs import BucketWorkplace
from tests.cluster.faults import pods
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.finetune_jobs import ENDLESS, RunArtifacts, Workplace
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def buckets(workplace: Workplace, cluster: ClusterUnderTest) -> Iterator[BucketWorkplace]:
    with bucket_jobs.bucket_workplace(workplace, cluster.nodes[0]) as found:
        yield found


def test_job_in_a_bucket_survives_the_loss_of_its_head(
    buckets: BucketWorkplace,
    cluster: ClusterUnderTest,
    operator: Operator,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    with buckets.running(buckets.manifest("in-a-bucket", training={"maxSteps": ENDLESS})) as job:
        harness = FaultHarness(cluster, Fault(cluster), operator, job)
        pods.head_pod_deleted_by_force(harness)
        job.finish_soon()
        harness.verify_outcome(undisturbed, tmp_path)
        status = job.history.last.status
        assert status["output"] == f"{job.bucket.url}/export"
        assert job.history.last.condition("StorageReady")["reason"] == "Bucket"
        assert not job.kubectl("get", "pvc", f"spotune-{job.name}", "--ignore-not-found")
    assert job.bucket.read("export/model.safetensors") is not None, "the bucket is kept"
