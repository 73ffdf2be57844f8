"""The pod that reads a volume: settings copied from the head pod, and minimal permissions."""

from pathlib import Path
from typing import Any

import pytest

from spotune.custom_resource.object_names import JOB_LABEL
from spotune.errors import JobError, UsageError
from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
from spotune_client.cluster.volume_pod import (
    container_state,
    job_directory,
    pinned_template,
    running_pod,
    volume_pod_manifest,
)
from spotune_operator.cli.head_template import head_template
from tests.client.support.stateful_server import Store, serving_store
from tests.operator.support.objects import UID, ago, finetune_job, pinned

TEMPLATE = {
    "metadata": {"labels": {"team": "nlp"}},
    "spec": {"imagePullSecrets": [{"name": "registry"}], "nodeSelector": {"pool": "head"}, "priorityClassName": "high"},
}


def reader(**sections: Any) -> dict[str, Any]:
    """The volume pod of a job whose status contains a pinned cluster."""
    _, kept = pinned(**sections)
    return volume_pod_manifest(finetune_job(pinned=kept), "logs", ["cat", "file"], 60, pinned_template)


def test_volume_pod_copies_scheduling_and_image_pull_settings_of_the_head() -> None:
    spec = reader(head={"podTemplate": TEMPLATE}, cluster={"image": "registry.example/mine:2"})["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"pool": "head"}
    assert "priorityClassName" not in spec
    assert spec["affinity"]["nodeAffinity"]
    assert spec["containers"][0]["image"] == "registry.example/mine:2"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_volume_pod_mounts_only_the_volume_read_only() -> None:
    spec = reader(storage={"existingClaim": "mine"})["spec"]
    assert [volume["persistentVolumeClaim"] for volume in spec["volumes"]] == [{"claimName": "mine"}]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/data", "readOnly": True}]
    assert spec["automountServiceAccountToken"] is False
    assert {item["name"] for item in spec["containers"][0]["env"]} == {"HOME", "PYTHONUNBUFFERED"}


def test_pod_of_a_job_in_a_bucket_downloads_its_state_first() -> None:
    storage = {"bucket": "s3://bucket/job", "credentials": {"secretName": "keys", "endpoint": "http://s3"}}
    sources = {"model": {"source": "hf://google-t5/t5-small"}, "dataset": {"train": {"source": "s3://data/shards"}}}
    manifest = reader(storage=storage, **sources)
    spec, [container] = manifest["spec"], manifest["spec"]["containers"]
    assert container["command"][:4] == ["python", "-m", "spotune_trainer.bucket.read_state", "s3://bucket/job"]
    assert container["command"][4].startswith("/data/default/job-")
    assert container["command"][5:] == ["cat", "file"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert {"name": "S3_ENDPOINT_URL", "value": "http://s3"} in container["env"]
    assert spec["volumes"] == [{"name": "data", "emptyDir": {}}]
    assert container["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]


def test_volume_pod_is_owned_by_the_job_but_not_counted_as_its_pod() -> None:
    manifest = reader()
    [owner] = manifest["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, False)
    assert manifest["spec"]["activeDeadlineSeconds"] == 60
    assert JOB_LABEL not in manifest["metadata"]["labels"]
    assert manifest["metadata"]["name"] != reader()["metadata"]["name"]


def test_job_directory_comes_from_the_pinned_cluster_not_from_the_current_spec() -> None:
    resolved, kept = pinned()
    job = finetune_job(pinned=kept)
    job["spec"] = {**job["spec"], "training": {"epochs": 1, "learningRate": 0.5}}
    assert job_directory(job, pinned_template) == str(resolved.directory)


def test_job_directory_of_a_job_that_has_not_started() -> None:
    job = finetune_job()
    assert job_directory(job, head_template).startswith("/data/team/t5-sql-")


def test_without_the_operator_s_templates_a_job_that_has_not_started_has_no_directory() -> None:
    with pytest.raises(UsageError, match="t5-sql has not started yet"):
        job_directory(finetune_job(), pinned_template)


def test_job_directory_of_an_invalid_job_is_an_error() -> None:
    job = finetune_job()
    job["spec"] = {**job["spec"], "training": {}}
    with pytest.raises(JobError, match="training"):
        job_directory(job, head_template)


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, {}),
        ({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]}, "waiting"),
        ({"phase": "Running", "containerStatuses": [{"state": {"running": {"startedAt": ago(1)}}}]}, "running"),
        ({"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}, "terminated"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, "terminated"),
    ],
)
def test_state_of_the_container(status: dict[str, Any], state: str) -> None:
    assert list(container_state({"status": status})) == ([state] if state else [])


def test_starting_a_pod_survives_an_outage_of_the_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notified: list[str] = []
    with serving_store(tmp_path) as (store, kubeconfig):

        def start_pod_and_fail(path: str, content: dict[str, Any]) -> dict[str, Any]:
            state = {"running": {"startedAt": ago(1)}}
            found = Store.put(store, path, content | {"status": {"containerStatuses": [{"state": state}]}})
            store.is_down = True
            return found

        def notify(text: str) -> None:
            notified.append(text)
            store.is_down = False

        monkeypatch.setattr(store, "put", start_pod_and_fail)
        with running_pod(open_cluster(ClusterOptions(kubeconfig=kubeconfig)), reader(), notify) as name:
            assert len(store.objects) == 1
        assert store.objects == {}
    assert len(notified) == 1
    assert notified[0].startswith(f"waiting for pod {name}: ")
    assert notified[0].endswith("the API server is down; retrying")
