"""A job whose only storage is a bucket is trained by `kubectl apply`; `make bucket-faults` injects faults into such."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotune.job import FinetuneJob
from spotune.job_file.load import replace_fields
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_testcluster.waiting import wait_for
from spotune_trainer.job_directory.layout import JobDirectory
from tests.cluster import bucket_jobs, test_own_function
from tests.cluster.bucket_jobs import BucketJob, BucketWorkplace
from tests.cluster.faults import pods
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.finetune_jobs import ENDLESS, INPUTS, RunArtifacts, Workplace
from tests.cluster.operator_install import Operator
from tests.trainer.training_functions.ranks import run_generation

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

_FEW_STEPS = 50
_EPOCHS = 150
"""Of the own function: with the pause, they last longer than the loss of a pod."""
_SPOTUNE = str(Path(sys.executable).with_name("spotune"))


@pytest.fixture(scope="module")
def buckets(workplace: Workplace, cluster: ClusterUnderTest) -> Iterator[BucketWorkplace]:
    with bucket_jobs.bucket_workplace(workplace, cluster.nodes[0]) as found:
        yield found


def spotune(job: BucketJob, command: str, *options: str) -> str:
    """Output of a command about a job."""
    access = [f"--kubeconfig={job.kubectl.kubeconfig}", f"--namespace={job.kubectl.namespace}"]
    done = subprocess.run([_SPOTUNE, command, job.name, *options, *access], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_job_in_a_bucket_is_trained_without_a_volume_and_the_bucket_is_kept(
    buckets: BucketWorkplace,
    operator: Operator,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    operator.wait_until_ready()
    with buckets.running(buckets.manifest("in-a-bucket", training={"maxSteps": _FEW_STEPS})) as job:
        ended = job.wait_until_complete()
        assert ended.status["output"] == f"{job.bucket.url}/export"
        assert ended.condition("StorageReady")["reason"] == "Bucket"
        assert not job.kubectl("get", "pvc", f"spotune-{job.name}", "--ignore-not-found")
        job.kubectl("delete", "ftj", job.name)
        artifacts, reference = job.artifacts(tmp_path), undisturbed(_FEW_STEPS)
        assert artifacts.sha256() == reference.sha256()
        assert artifacts.samples() == reference.samples()


def test_job_in_a_bucket_survives_the_loss_of_its_head_and_is_reported_when_its_pods_are_gone(
    buckets: BucketWorkplace,
    cluster: ClusterUnderTest,
    operator: Operator,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    operator.wait_until_ready()
    with buckets.running(buckets.manifest("lost-head", training={"maxSteps": ENDLESS})) as job:
        harness = FaultHarness(cluster, Fault(cluster), operator, job)
        pods.head_pod_deleted_by_force(harness)
        job.finish_soon()
        harness.verify_outcome(undisturbed, tmp_path)
        wait_for("the end of the head", 120, lambda: not job.pods("head"), every=0.5)
        logs = spotune(job, "logs")
        assert "gen-1/worker-0:" in logs
        assert "gen-1/worker-1:" in logs
        page = tmp_path / "report.html"
        spotune(job, "report", "--file", str(page))
        assert f"<h1>{job.name}</h1>" in page.read_text()


def test_own_function_continues_from_the_bucket_after_the_loss_of_a_pod(
    buckets: BucketWorkplace, cluster: ClusterUnderTest, operator: Operator, tmp_path: Path
) -> None:
    operator.wait_until_ready()
    name = "own-function-in-a-bucket"
    (buckets.inputs / name).mkdir()
    for file in test_own_function.FILES:
        shutil.copy(file, buckets.inputs / name)
    buckets.add_input(name)
    own = test_own_function.manifest(buckets, {})
    config = {**test_own_function.CONFIG, "epochs": _EPOCHS, "pause": test_own_function.PAUSE_SECONDS}
    own["metadata"]["name"] = name
    own["spec"]["training"] = {"function": "slow_epochs:main", "code": f"{INPUTS}/{name}", "config": config}
    with buckets.running(buckets.kept_in_bucket(own)) as job:
        harness = FaultHarness(cluster, Fault(cluster), operator, job)
        pods.worker_pod_deleted(harness)
        ended = job.wait_until_complete()
        artifacts = job.artifacts(tmp_path / "artifacts")
        harness.assert_status_invariants(artifacts)
        assert ended.status["output"] == f"{job.bucket.url}/export"
        assert not job.kubectl("get", "pvc", f"spotune-{job.name}", "--ignore-not-found")

    assert ended.status["restarts"]["total"] == 1
    assert [line["step"] for line in artifacts.steps()] == list(range(1, _EPOCHS + 1))
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    changes = {"spec.training.code": str(buckets.inputs / name), "spec.training.config": {**config, "pause": 0.0}}
    run_generation(undisturbed, replace_fields(FinetuneJob.model_validate(own), changes))
    assert (artifacts.directory.export / "state.pt").read_bytes() == (undisturbed.export / "state.pt").read_bytes()
