"""The output of `spotune render` trains a job without the operator, even through the loss of the head.

Part of `make faults`. It shows that supervisor, kubelet and KubeRay alone restart failed attempts.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.cluster.finetune_jobs import STEPS, RunArtifacts, RunningJob, Workplace
from tests.cluster.status_history import StatusHistory

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture
def job(workplace: Workplace, tmp_path: Path) -> Iterator[RunningJob]:
    """A job whose children exist in the cluster without a FinetuneJob."""
    manifest = workplace.manifest("rendered", training={"maxSteps": STEPS})
    workplace.kubectl.apply(*_rendered(manifest, tmp_path / "job.yaml"))
    try:
        yield RunningJob(workplace, manifest, StatusHistory(workplace.kubectl, "rendered"))
    finally:
        workplace.kubectl("delete", "rayclusters,networkpolicies,configmaps", "--selector=spotune.dev/job=rendered")


def _rendered(manifest: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    path.write_text(json.dumps(manifest))
    command = [str(Path(sys.executable).with_name("spotune")), "render", str(path), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    objects: list[dict[str, Any]] = json.loads(done.stdout)["items"]
    return objects


def test_rendered_job_is_trained_through_the_loss_of_the_head(
    job: RunningJob, cluster: ClusterUnderTest, undisturbed: Callable[[int], RunArtifacts], tmp_path: Path
) -> None:
    job.wait_for_commit()
    workers = job.worker_uids()
    if cluster.machine:
        assert _nodes(job, "workers") == ["n2", "n3"], "workers belong on spot nodes"
        assert _nodes(job, "head") == ["n1"], "the head belongs on an on-demand node"
    job.kubectl("delete", "pod", job.head()["metadata"]["name"], "--wait=false")
    ended = job.wait_for_progress("the end of training", lambda found: found.get("phase") == "Done")
    assert (ended["step"], ended["generation"], ended["stepsLost"]) == (STEPS, 1, 0)
    assert ended["restarts"]["headLost"] == 1
    assert job.worker_uids() == workers
    artifacts, reference = job.artifacts(tmp_path), undisturbed(STEPS)
    assert artifacts.samples() == reference.samples()
    assert artifacts.sha256() == reference.sha256()


def _nodes(job: RunningJob, component: str) -> list[str]:
    return sorted(pod["spec"]["nodeName"] for pod in job.pods(component))
