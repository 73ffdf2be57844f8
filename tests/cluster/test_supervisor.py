"""The trainer in pods, without the operator: a supervisor beside the head trains a job through the loss of it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from spotune_testcluster.waiting import wait_for
from tests.cluster.pods import claim, pod, run_in, wait_until_running
from tests.cluster.ray_clusters import RayCluster, ray_cluster, started
from tests.trainer.tiny import make_job, save_source

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

WORKERS = 2
STEPS = 1500
DIRECTORY = "/data/jobs/tiny"
SUPERVISOR_PORT = 8090


@pytest.fixture(scope="module")
def volume(cluster: ClusterUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """A namespace with a volume that holds a tiny model, rows and a job, and with a pod that sees it."""
    inputs = tmp_path_factory.mktemp("inputs")
    save_source(inputs / "source", "seq2seq")
    rows = [{"question": f"how many {number}", "sql": f"SELECT {number}"} for number in range(256)]
    (inputs / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (inputs / "job.yaml").write_text(json.dumps(_job()))
    with temporary_namespace(cluster.kubectl) as kubectl:
        writer = pod("volume", cluster.image, node="n1", claims={"/data": "data"})
        kubectl.apply(claim("data", "600Mi", cluster.storage_class), writer)
        wait_until_running(kubectl, "volume")
        _copy(kubectl, inputs, "volume")
        yield kubectl


def _job() -> dict[str, Any]:
    job = make_job(
        "/data/inputs/source",
        dataset={
            "train": None, "eval": None, "prepare": {"source": "/data/inputs/rows.jsonl"},
            "prompt": "{question}", "completion": "{sql}", "maxLength": 32, "maxCompletionLength": 16,
        },
        training={"epochs": None, "maxSteps": STEPS, "globalBatchSize": 8},
        execution={"microBatchSize": 4, "zeroStage": 1},
        checkpoint={"every": 50},
        workers={"count": WORKERS, "gpus": 0},
    )  # fmt: skip
    found: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return found


def _copy(kubectl: Kubectl, folder: Path, name: str) -> None:
    """Copy a folder to /data/inputs of a pod."""
    packed = subprocess.run(["tar", "--create", "--directory", folder, "."], capture_output=True, check=True).stdout
    run_in(kubectl, name, "mkdir", "/data/inputs")
    command = [kubectl.program, f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={kubectl.namespace}", "exec", "-i"]
    subprocess.run([*command, name, "--", "tar", "--extract", "--directory=/data/inputs"], input=packed, check=True)


def _with_supervisor(manifest: dict[str, Any]) -> dict[str, Any]:
    """A RayCluster with the volume on every pod and a supervisor in the head's."""
    mount = {"name": "data", "mountPath": "/data"}
    head = manifest["spec"]["headGroupSpec"]["template"]["spec"]
    worker = manifest["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    for spec in (head, worker):
        spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
        spec["containers"][0]["volumeMounts"] = [mount]
        spec["containers"][0]["env"] += [{"name": "DS_ACCELERATOR", "value": "cpu"}]
    serve = f"0.0.0.0:{SUPERVISOR_PORT}"
    head["containers"][0]["ports"] += [{"name": "progress", "containerPort": SUPERVISOR_PORT}]
    token = {"secretKeyRef": {"name": manifest["metadata"]["name"], "key": "auth_token"}}
    supervisor = {
        "name": "supervisor",
        "image": head["containers"][0]["image"],
        "command": ["spotune", "supervise", "/data/inputs/job.yaml", "--directory", DIRECTORY, "--serve", serve],
        "env": [{"name": "RAY_AUTH_TOKEN", "valueFrom": token}, {"name": "PYTHONUNBUFFERED", "value": "1"}],
        "volumeMounts": [mount],
    }
    head["containers"].append(supervisor)
    return manifest


def _status(kubectl: Kubectl) -> dict[str, Any]:
    """What the trainer says of itself on the volume; empty before it has said anything."""
    text = run_in(kubectl, "volume", "bash", "-c", f"cat {DIRECTORY}/status.json 2>/dev/null || echo '{{}}'")
    found: dict[str, Any] = json.loads(text)
    return found


def test_job_is_trained_through_the_loss_of_the_head(cluster: ClusterUnderTest, volume: Kubectl) -> None:
    """Depends on it: the operator is not in the loop of attempts; supervisor, kubelet and KubeRay are enough."""
    manifest = _with_supervisor(ray_cluster("tiny", cluster.image, WORKERS))
    with started(volume, manifest) as ray:
        wait_for("a commit", 180, lambda: (_status(volume).get("lastCheckpoint") or {}).get("step", 0) >= 100, every=1)
        workers = {worker["metadata"]["uid"] for worker in ray.workers()}
        volume("delete", "pod", ray.head()["metadata"]["name"], "--wait=false")
        wait_for("the end of training", 300, lambda: _phase_of(ray, volume) == "Done", every=1)
        status = _status(volume)
        assert status["step"] == STEPS
        assert status["resumedFromStep"] >= 100
        assert status["generation"] == 2
        assert {worker["metadata"]["uid"] for worker in ray.workers()} == workers
        exported = run_in(volume, "volume", "ls", f"{DIRECTORY}/export").split()
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(exported)


def _phase_of(ray: RayCluster, volume: Kubectl) -> str:
    phase: str = _status(volume).get("phase", "")
    assert phase != "Failed", volume("logs", ray.head()["metadata"]["name"], "--container=supervisor")
    return phase
