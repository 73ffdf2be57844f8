"""The views of the API server's objects."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from spotune_operator.observe.state import Child, child_view, pod_view

CONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {
        "name": "spotune-job",
        "namespace": "team",
        "uid": "uid-1",
        "resourceVersion": "5",
        "creationTimestamp": "2027-01-15T08:00:00Z",
        "labels": {"spotune.dev/job": "job"},
        "ownerReferences": [{"uid": "uid-0"}],
        "managedFields": [{"manager": "spotune"}],
    },
    "data": {"job.yaml": "spec: {}"},
}


def view(**changes: Any) -> Child:
    raw = deepcopy(CONFIG)
    for path, value in changes.items():
        *parents, name = path.split("__")
        section = raw
        for parent in parents:
            section = section[parent]
        section.pop(name, None)
        if value is not None:
            section[name] = value
    return child_view(raw, "ConfigMap")


def test_digest_does_not_depend_on_the_kind_that_lists_omit() -> None:
    assert view(apiVersion=None, kind=None) == view()


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata__resourceVersion": "6"},
        {"metadata__managedFields": [{"manager": "kubectl"}]},
        {"metadata__generation": 7},
        {"status": {"phase": "Active"}},
    ],
    ids=str,
)
def test_fields_of_the_api_server_do_not_change_the_digest(changes: dict[str, Any]) -> None:
    assert view(**changes).digest == view().digest


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"job.yaml": "spec: {x: 1}"}},
        {"metadata__labels": {"spotune.dev/job": "job", "more": "x"}},
        {"metadata__annotations": {"more": "x"}},
        {"metadata__ownerReferences": None},
        {"immutable": True},
    ],
    ids=str,
)
def test_every_writable_field_changes_the_digest(changes: dict[str, Any]) -> None:
    assert view(**changes).digest != view().digest


def test_child_being_deleted_is_marked() -> None:
    assert view(metadata__deletionTimestamp="2027-01-15T08:00:00Z").deleting


def test_minimal_pod_is_parsed() -> None:
    raw = {"metadata": {"name": "p", "namespace": "team", "uid": "u", "creationTimestamp": "2027-01-15T08:00:00Z"}}
    pod = pod_view(raw | {"spec": {}})
    assert (pod.job, pod.component, pod.phase, pod.ip, pod.gpus) == ("", "", "Pending", "", 0)
    assert (pod.created, pod.started, pod.deleting_since, pod.runs) == (1_800_000_000.0, None, None, False)


def test_terminating_pod_has_the_time_of_its_deletion_request() -> None:
    metadata = {
        "name": "p",
        "namespace": "team",
        "uid": "u",
        "creationTimestamp": "2027-01-15T08:00:00Z",
        "deletionTimestamp": "2027-01-15T08:10:30Z",
        "deletionGracePeriodSeconds": 30,
    }
    pod = pod_view({"metadata": metadata, "spec": {}, "status": {"phase": "Running"}})
    assert (pod.deleting_since, pod.grace_seconds, pod.runs) == (1_800_000_600.0, 30.0, False)
