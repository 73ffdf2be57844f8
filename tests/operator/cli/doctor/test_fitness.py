"""Checks of permissions, storage, GPUs and images, with their remedies."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from spotune_operator.cli.doctor.check import (
    Check,
    Forbidden,
    Verdict,
    failed,
    plain_text,
    render,
)
from spotune_operator.cli.doctor.gpus import gpus
from spotune_operator.cli.doctor.image import probe_pod, verdict
from spotune_operator.cli.doctor.permissions import PERMISSIONS, permissions
from spotune_operator.cli.doctor.storage import storage
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import AKS, EKS, GKE, NONE, Provider
from tests import ROOT

FORBIDDEN = Forbidden("you may not list it")
SPOT = {"kubernetes.azure.com/scalesetpriority": "spot"}


def found(check: Check) -> tuple[str, str]:
    return check.verdict.value, check.message


def judged(*denied: tuple[str, str]) -> Check:
    """The check for a user with all permissions except the given (verb, resource) pairs."""

    def create_review(body: dict[str, Any]) -> dict[str, Any]:
        asked = body["spec"]["resourceAttributes"]
        assert asked["namespace"] == "team"
        resource = "/".join(filter(None, [asked["resource"], asked.get("subresource")]))
        return {"status": {"allowed": (asked["verb"], resource) not in denied}}

    return permissions("team", create_review)


def storage_class(name: str, provisioner: str, default: bool = False, **parameters: str) -> dict[str, Any]:
    marks = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": marks}, "provisioner": provisioner, "parameters": parameters}


def test_user_with_all_permissions_passes() -> None:
    assert judged().verdict is Verdict.PASSED


@pytest.mark.parametrize(
    "permission", PERMISSIONS, ids=lambda permission: f"{permission.resource}-{'-'.join(permission.verbs)}"
)
def test_each_missing_permission_is_named_with_its_purpose(permission: Any) -> None:
    check = judged(*((verb, permission.resource) for verb in permission.verbs))
    assert check.verdict is (Verdict.FAILED if permission.essential else Verdict.WARNING)
    assert f"{' and '.join(permission.verbs)} {permission.resource} ({permission.purpose})" in check.message
    assert "Role" in check.remedy


def test_only_missing_verbs_are_named() -> None:
    check = judged(("create", "pods/portforward"), ("list", "events"))
    assert found(check) == (
        "warning",
        (
            "in namespace team you may not create pods/portforward (logs, tensorboard); "
            "list events (events, status of a service)"
        ),
    )


@pytest.mark.parametrize(
    ("classes", "provider", "wanted", "verdict", "message"),
    [
        (FORBIDDEN, AKS, "", "warning", "cannot list storage classes: you may not list it"),
        ([], NONE, "", "failed", "there is no default storage class, and no known default for the provider"),
        (
            [storage_class("gp3", "ebs.csi.aws.com", True)],
            EKS,
            "",
            "failed",
            "there is no storage class efs-sc; existing classes: gp3",
        ),
        (
            [storage_class("efs-sc", "efs.csi.aws.com")],
            EKS,
            "",
            "passed",
            "efs-sc (efs.csi.aws.com) supports ReadWriteMany",
        ),
        ([storage_class("a", "file.csi.azure.com")], AKS, "a", "failed", "a is Azure Files over SMB"),
        (
            [storage_class("a", "file.csi.azure.com", protocol="nfs")],
            AKS,
            "a",
            "passed",
            "a (file.csi.azure.com) supports",
        ),
        (
            [storage_class("d", "pd.csi.storage.gke.io", True)],
            NONE,
            "",
            "failed",
            "d (pd.csi.storage.gke.io) is a disk",
        ),
        ([storage_class("ceph", "rook-ceph.cephfs.csi.ceph.com", True)], NONE, "", "passed", "ceph (rook-ceph.cephfs"),
        (
            [storage_class("x", "example.com/x", True)],
            NONE,
            "",
            "warning",
            "cannot tell whether x (example.com/x) supports ReadWriteMany",
        ),
        ([storage_class("standard-rwo", "x", True)], GKE, "other", "failed", "there is no storage class other"),
    ],
)
def test_storage_class_is_the_one_that_jobs_would_use(
    classes: Any, provider: Provider, wanted: str, verdict: str, message: str
) -> None:
    check = storage(classes, provider, wanted)
    assert check.verdict.value == verdict
    assert check.message.startswith(message)


@pytest.mark.parametrize("provider", [AKS, GKE, EKS], ids=lambda provider: provider.name)
def test_remedy_for_a_missing_default_class_names_existing_files(provider: Provider) -> None:
    remedy = storage([], provider, "").remedy
    assert storage([], provider, "other").remedy != remedy
    assert all((ROOT / manifest).is_file() for manifest in re.findall(r"manifests/\S+\.yaml", remedy))


@pytest.mark.parametrize(
    ("nodes", "provider", "verdict", "message"),
    [
        (FORBIDDEN, AKS, "warning", "cannot list nodes: you may not list it"),
        ([], AKS, "warning", "no node has a GPU at the moment: jobs wait until a node pool grows"),
        ([NodeView("n1")], AKS, "warning", "no node has a GPU at the moment: jobs wait until a node pool grows"),
        (
            [
                NodeView("n1", gpu_capacity=8, gpu_allocatable=8),
                NodeView("n2", gpu_capacity=1, gpu_allocatable=1, labels=SPOT),
            ],
            AKS,
            "passed",
            "9 GPU(s) on 2 node(s), 1 of them spot",
        ),
        (
            [NodeView("n1", gpu_capacity=1, gpu_allocatable=1)],
            AKS,
            "passed",
            "1 GPU(s) on 1 node(s), 0 of them spot: with workers.capacity spot, jobs wait until a spot pool grows",
        ),
        (
            [NodeView("n1", gpu_capacity=1, gpu_allocatable=1)],
            NONE,
            "passed",
            "1 GPU(s) on 1 node(s); cannot tell which of them are spot nodes",
        ),
        (
            [NodeView("n1", gpu_capacity=8, gpu_allocatable=6)],
            NONE,
            "warning",
            "2 GPU(s) of n1 are unhealthy",
        ),
        (
            [NodeView("n1", labels={"cloud.google.com/gke-accelerator": "nvidia-l4"}), NodeView("n2")],
            GKE,
            "failed",
            "n1 should have GPUs, but no nvidia.com/gpu is allocatable: no device plugin runs there",
        ),
        (
            [NodeView(f"n{number}", labels={"nvidia.com/gpu.present": "true"}) for number in range(7)],
            NONE,
            "failed",
            (
                "n0, n1, n2, n3, n4 and 2 more should have GPUs, "
                "but no nvidia.com/gpu is allocatable: no device plugin runs there"
            ),
        ),
    ],
)
def test_gpus_are_counted_as_device_plugins_offer_them(
    nodes: Any, provider: Provider, verdict: str, message: str
) -> None:
    assert found(gpus(nodes, provider)) == (verdict, message)


@pytest.mark.parametrize(
    ("state", "verdict_", "message"),
    [
        ({}, None, ""),
        ({"waiting": {"reason": "ContainerCreating"}}, None, ""),
        ({"waiting": {"reason": "ErrImagePull", "message": "timeout"}}, None, ""),
        (
            {
                "waiting": {
                    "reason": "ImagePullBackOff",
                    "message": 'Back-off pulling image "x": ErrImagePull: not found',
                }
            },
            Verdict.FAILED,
            "image x cannot be pulled: not found",
        ),
        ({"waiting": {"reason": "InvalidImageName", "message": "bad"}}, Verdict.FAILED, "x: bad"),
        ({"waiting": {"reason": "RunContainerError"}}, Verdict.PASSED, "node n1 pulled x"),
        ({"running": {}}, Verdict.PASSED, "node n1 pulled x"),
        ({"terminated": {"exitCode": 128, "reason": "StartError"}}, Verdict.PASSED, "node n1 pulled x"),
    ],
)
def test_image_is_pulled_once_a_container_was_created(
    state: dict[str, Any], verdict_: Verdict | None, message: str
) -> None:
    metadata = {"name": "spotune-doctor-1", "namespace": "team"}
    pod = {
        "metadata": metadata,
        "spec": {"nodeName": "n1"},
        "status": {"containerStatuses": [{"name": "true", "image": "x", "state": state}]},
    }
    check = verdict("x", pod)
    assert (check.verdict if check else None) is verdict_
    assert check is None or check.message.startswith(message)


def test_probe_pod_meets_the_restricted_security_standard() -> None:
    spec = probe_pod("x", "team")["spec"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_line_has_the_remedy_below() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    check = failed("storage", "there is no storage class efs-sc", "make it")
    console.print(render(check))
    lines = [row.rstrip() for row in console.export_text().splitlines()]
    assert lines == [
        "failed   storage           there is no storage class efs-sc",
        "                           -> make it",
    ]
    assert plain_text(check).splitlines() == lines
