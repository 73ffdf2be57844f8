"""What `spotune render` prints trains a job by itself, under restricted pod security, through the loss of the head.

Depends on it: the operator is not in the loop of attempts; supervisor, kubelet and KubeRay are enough.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from spotune_testcluster.waiting import wait_for
from tests.cluster.pods import pod, restricted, run_in, wait_until_running
from tests.trainer.tiny import make_job, save_source

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

WORKERS = 2
STEPS = 1500
SMALL = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "3Gi"}}


@pytest.fixture
def children(cluster: ClusterUnderTest, tmp_path: Path) -> Iterator[tuple[Kubectl, str]]:
    """A namespace with a tiny job's children and data but without its RayCluster; and that RayCluster's manifest."""
    with temporary_namespace(cluster.kubectl) as kubectl:
        kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
        save_source(tmp_path / "source", "seq2seq")
        rows = [{"question": f"how many {number}", "sql": f"SELECT {number}"} for number in range(256)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "job.yaml").write_text(json.dumps(_job(cluster, kubectl.namespace)))
        objects = _rendered(tmp_path / "job.yaml")
        (ray_cluster,) = (found for found in objects if found["kind"] == "RayCluster")
        kubectl.apply(*(found for found in objects if found is not ray_cluster))
        kubectl.apply(restricted(pod("volume", cluster.image, node=cluster.nodes[0], claims={"/data": "spotune-tiny"})))
        wait_until_running(kubectl, "volume")
        _copy(kubectl, tmp_path)
        shard = ("spotune", "shard", "/data/inputs/rows.jsonl", "--job", "/data/inputs/job.yaml")
        run_in(kubectl, "volume", *shard, "--directory", "/data/inputs/shards")
        yield kubectl, json.dumps(ray_cluster)


def _job(cluster: ClusterUnderTest, namespace: str) -> dict[str, Any]:
    job = make_job(
        "/data/inputs/source",
        dataset={
            "train": {"source": "/data/inputs/shards"}, "eval": None, "prompt": "{question}", "completion": "{sql}",
            "maxLength": 32, "maxCompletionLength": 16,
        },
        training={"epochs": None, "maxSteps": STEPS, "globalBatchSize": 8},
        execution={"microBatchSize": 4, "zeroStage": 1},
        checkpoint={"every": 50},
        workers={"count": WORKERS, "gpus": 0, "resources": SMALL},
        head={"resources": SMALL},
        storage={"storageClassName": cluster.storage_class, "size": "600Mi"},
        cluster={"provider": "aks" if cluster.machine else "none", "image": cluster.image},
    )  # fmt: skip
    found: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    found["metadata"]["namespace"] = namespace
    return found


def _rendered(job: Path) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).with_name("spotune")), "render", str(job), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    objects: list[dict[str, Any]] = json.loads(done.stdout)["items"]
    return objects


def _copy(kubectl: Kubectl, folder: Path) -> None:
    """Copy a folder to /data/inputs of the pod `volume`."""
    packed = subprocess.run(["tar", "--create", "--directory", folder, "."], capture_output=True, check=True).stdout
    run_in(kubectl, "volume", "mkdir", "/data/inputs")
    unpack = ("tar", "--extract", "--no-same-owner", "--directory=/data/inputs")
    access = [kubectl.program, f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={kubectl.namespace}"]
    subprocess.run([*access, "exec", "-i", "volume", "--", *unpack], input=packed, check=True)


class Job:
    """The tiny job on the cluster, seen from a pod on its volume."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._directory = f"/data/{kubectl.namespace}/tiny-*"

    def status(self) -> dict[str, Any]:
        """What the trainer says of itself; empty before it has said anything."""
        script = f"cat {self._directory}/status.json 2>/dev/null || echo '{{}}'"
        found: dict[str, Any] = json.loads(run_in(self._kubectl, "volume", "bash", "-c", script))
        assert found.get("phase") != "Failed", found.get("message")
        return found

    def committed(self) -> int:
        """Step of the newest checkpoint."""
        step: int = (self.status().get("lastCheckpoint") or {}).get("step", 0)
        return step

    def exported(self) -> set[str]:
        """Files of the finished model."""
        return set(run_in(self._kubectl, "volume", "bash", "-c", f"ls {self._directory}/export").split())


def _pods(kubectl: Kubectl, component: str) -> dict[str, str]:
    """Uid of each pod of a component of the job, by its node."""
    found = kubectl.get("pods", f"--selector=spotune.dev/job=tiny,app.kubernetes.io/component={component}")
    return {pod["spec"].get("nodeName", ""): pod["metadata"]["uid"] for pod in found}


def test_job_is_trained_through_the_loss_of_the_head(cluster: ClusterUnderTest, children: tuple[Kubectl, str]) -> None:
    kubectl, ray_cluster = children
    kubectl("apply", "--server-side", "--filename=-", stdin=ray_cluster)
    job = Job(kubectl)
    wait_for("a commit", 240, lambda: job.committed() >= 100, every=1)
    workers = _pods(kubectl, "workers")
    if cluster.machine:
        assert set(workers) == {"n2", "n3"}, "workers belong on spot nodes"
        assert set(_pods(kubectl, "head")) == {"n1"}, "the head belongs on an on-demand node"
    head = "--selector=spotune.dev/job=tiny,app.kubernetes.io/component=head"
    kubectl("delete", "pods", head, "--wait=false")
    wait_for("the end of training", 400, lambda: job.status().get("phase") == "Done", every=1)
    status = job.status()
    assert (status["step"], status["generation"]) == (STEPS, 2)
    assert status["resumedFromStep"] >= 100
    assert _pods(kubectl, "workers") == workers
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= job.exported()
