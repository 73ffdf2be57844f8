"""The pod that reads a volume: as the head is made, and no more than it needs."""

from typing import Any

import pytest

from spotune.errors import JobError
from spotune_operator.children.resolved_job import JOB_LABEL
from spotune_operator.cli.cluster.volume_pod import container_state, job_directory, reader_pod
from tests.operator.support.objects import UID, ago, finetune_job, pinned

TEMPLATE = {
    "metadata": {"labels": {"team": "nlp"}},
    "spec": {"imagePullSecrets": [{"name": "registry"}], "nodeSelector": {"pool": "head"}, "priorityClassName": "high"},
}


def reader(**sections: Any) -> dict[str, Any]:
    """The reader of a job that is run with what its status keeps."""
    _, kept = pinned(**sections)
    return reader_pod(finetune_job(pinned=kept), "logs", ["cat", "file"], 60)


def test_reader_is_let_in_placed_and_given_images_as_the_head_is() -> None:
    spec = reader(head={"podTemplate": TEMPLATE}, cluster={"image": "registry.example/mine:2"})["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"pool": "head"}
    assert "priorityClassName" not in spec
    assert spec["affinity"]["nodeAffinity"]
    assert spec["containers"][0]["image"] == "registry.example/mine:2"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_reader_has_the_volume_alone_and_cannot_write_to_it() -> None:
    spec = reader(storage={"existingClaim": "mine"})["spec"]
    assert [volume["persistentVolumeClaim"] for volume in spec["volumes"]] == [{"claimName": "mine"}]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/data", "readOnly": True}]
    assert spec["automountServiceAccountToken"] is False
    assert {item["name"] for item in spec["containers"][0]["env"]} == {"HOME", "PYTHONUNBUFFERED"}


def test_reader_goes_with_the_job_and_by_itself_but_is_none_of_the_jobs_pods() -> None:
    manifest = reader()
    [owner] = manifest["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, False)
    assert manifest["spec"]["activeDeadlineSeconds"] == 60
    assert JOB_LABEL not in manifest["metadata"]["labels"]
    assert manifest["metadata"]["name"] != reader()["metadata"]["name"]


def test_folder_is_that_of_the_pods_and_not_what_the_spec_says_by_now() -> None:
    placed, kept = pinned()
    job = finetune_job(pinned=kept)
    job["spec"] = {**job["spec"], "training": {"epochs": 1, "learningRate": 0.5}}
    assert job_directory(job) == str(placed.directory)


def test_job_that_was_never_run_has_the_folder_that_it_would_have() -> None:
    job = finetune_job()
    assert job_directory(job).startswith("/data/team/t5-sql-")


def test_job_that_could_never_run_has_no_folder() -> None:
    job = finetune_job()
    job["spec"] = {**job["spec"], "training": {}}
    with pytest.raises(JobError, match="training"):
        job_directory(job)


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
