"""Permissions, storage, GPUs and images: what is missing, and how to mend it."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spotune_operator.cli.doctor.check import Check, Hidden, Verdict, failed, line, plain
from spotune_operator.cli.doctor.gpus import gpus
from spotune_operator.cli.doctor.image import probe_pod, verdict
from spotune_operator.cli.doctor.permissions import NEEDS, permissions
from spotune_operator.cli.doctor.storage import storage
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import AKS, EKS, GKE, NONE, Provider

ROOT = Path(__file__).parent.parent.parent.parent.parent
HIDDEN = Hidden("you may not list it")
SPOT = {"kubernetes.azure.com/scalesetpriority": "spot"}


def found(check: Check) -> tuple[str, str]:
    return check.verdict.value, check.message


def judged(*denied: tuple[str, str]) -> Check:
    """The check of a user who may do everything but some (verb, resource)."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        asked = body["spec"]["resourceAttributes"]
        assert asked["namespace"] == "team"
        resource = "/".join(filter(None, [asked["resource"], asked.get("subresource")]))
        return {"status": {"allowed": (asked["verb"], resource) not in denied}}

    return permissions("team", ask)


def storage_class(name: str, provisioner: str, default: bool = False, **parameters: str) -> dict[str, Any]:
    marks = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": marks}, "provisioner": provisioner, "parameters": parameters}


def test_user_who_may_do_all_passes() -> None:
    assert judged().verdict is Verdict.PASSED


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.resource}-{'-'.join(need.verbs)}")
def test_each_right_that_is_missing_is_named_with_what_it_is_for(need: Any) -> None:
    check = judged(*((verb, need.resource) for verb in need.verbs))
    assert check.verdict is (Verdict.FAILED if need.essential else Verdict.WARNING)
    assert f"{' and '.join(need.verbs)} {need.resource} ({need.purpose})" in check.message
    assert "Role" in check.remedy


def test_only_the_verbs_that_are_missing_are_named() -> None:
    check = judged(("create", "pods/portforward"), ("list", "events"))
    assert found(check) == (
        "warning",
        "in namespace team you may not create pods/portforward (logs, tensorboard); list events (events)",
    )


@pytest.mark.parametrize(
    ("classes", "provider", "wanted", "verdict", "message"),
    [
        (HIDDEN, AKS, "", "warning", "storage classes cannot be seen: you may not list it"),
        ([], NONE, "", "failed", "there is no default storage class, and the nodes are of no cloud whose usual one"),
        (
            [storage_class("gp3", "ebs.csi.aws.com", True)],
            EKS,
            "",
            "failed",
            "there is no storage class efs-sc; there is gp3",
        ),
        ([storage_class("efs-sc", "efs.csi.aws.com")], EKS, "", "passed", "efs-sc (efs.csi.aws.com) has ReadWriteMany"),
        ([storage_class("a", "file.csi.azure.com")], AKS, "a", "failed", "a is Azure Files over SMB"),
        ([storage_class("a", "file.csi.azure.com", protocol="nfs")], AKS, "a", "passed", "a (file.csi.azure.com) has"),
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
            "whether x (example.com/x) has ReadWriteMany",
        ),
        ([storage_class("standard-rwo", "x", True)], GKE, "other", "failed", "there is no storage class other"),
    ],
)
def test_storage_class_is_that_which_jobs_would_get(
    classes: Any, provider: Provider, wanted: str, verdict: str, message: str
) -> None:
    check = storage(classes, provider, wanted)
    assert check.verdict.value == verdict
    assert check.message.startswith(message)


@pytest.mark.parametrize("provider", [AKS, GKE, EKS], ids=lambda provider: provider.name)
def test_usual_class_that_is_missing_can_be_made(provider: Provider) -> None:
    remedy = storage([], provider, "").remedy
    assert storage([], provider, "other").remedy != remedy
    assert all((ROOT / manifest).is_file() for manifest in re.findall(r"manifests/\S+\.yaml", remedy))


@pytest.mark.parametrize(
    ("nodes", "provider", "verdict", "message"),
    [
        (HIDDEN, AKS, "warning", "nodes cannot be seen: you may not list it"),
        ([], AKS, "warning", "no node has a GPU now: jobs wait until a node pool grows"),
        ([NodeView("n1")], AKS, "warning", "no node has a GPU now: jobs wait until a node pool grows"),
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
            "1 GPU(s) on 1 node(s); which of them are spot nodes cannot be told",
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
            "n1 should have GPUs, but offers no nvidia.com/gpu: no device plugin runs there",
        ),
        (
            [NodeView(f"n{number}", labels={"nvidia.com/gpu.present": "true"}) for number in range(7)],
            NONE,
            "failed",
            "n0, n1, n2, n3, n4 and 2 more should have GPUs, but offers no nvidia.com/gpu: no device plugin runs there",
        ),
    ],
)
def test_gpus_are_those_that_device_plugins_offer(nodes: Any, provider: Provider, verdict: str, message: str) -> None:
    assert found(gpus(nodes, provider)) == (verdict, message)


@pytest.mark.parametrize(
    ("state", "verdict_", "words"),
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
        ({"waiting": {"reason": "RunContainerError"}}, Verdict.PASSED, "node n1 has x"),
        ({"running": {}}, Verdict.PASSED, "node n1 has x"),
        ({"terminated": {"exitCode": 128, "reason": "StartError"}}, Verdict.PASSED, "node n1 has x"),
    ],
)
def test_image_is_there_when_a_container_could_be_made_of_it(
    state: dict[str, Any], verdict_: Verdict | None, words: str
) -> None:
    metadata = {"name": "spotune-doctor-1", "namespace": "team"}
    pod = {
        "metadata": metadata,
        "spec": {"nodeName": "n1"},
        "status": {"containerStatuses": [{"name": "true", "image": "x", "state": state}]},
    }
    check = verdict("x", pod)
    assert (check.verdict if check else None) is verdict_
    assert check is None or check.message.startswith(words)


def test_probe_is_let_into_the_strictest_namespaces() -> None:
    spec = probe_pod("x", "team")["spec"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_line_has_the_remedy_below() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    check = failed("storage", "there is no storage class efs-sc", "make it")
    console.print(line(check))
    lines = [row.rstrip() for row in console.export_text().splitlines()]
    assert lines == [
        "failed   storage           there is no storage class efs-sc",
        "                           -> make it",
    ]
    assert plain(check).splitlines() == lines
