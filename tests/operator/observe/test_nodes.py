"""Views of nodes, and pods that are stuck on dead ones."""

from dataclasses import dataclass
from typing import Any

import pytest

from spotune_operator.observe.nodes import NodeView, node_view, stuck_pods

NOW = 1_800_000_000.0


@dataclass(frozen=True)
class Pod:
    name: str
    node: str = "n1"
    deleting_since: float | None = None
    grace_seconds: float = 30.0


@pytest.mark.parametrize("nodes", [{}, {"n1": NodeView("n1", ready=False)}], ids=["gone", "not-ready"])
@pytest.mark.parametrize(("grace", "seconds"), [(120.0, 10), (30.0, 10), (1.0, 6)])
def test_a_pod_that_does_not_end_on_a_dead_node_is_stuck(
    nodes: dict[str, NodeView], grace: float, seconds: int
) -> None:
    pod = Pod("a", deleting_since=NOW, grace_seconds=grace)
    assert stuck_pods([pod], nodes, NOW + seconds - 1) == []
    assert stuck_pods([pod], nodes, NOW + seconds) == [pod]


@pytest.mark.parametrize(
    "pod", [Pod("stays"), Pod("slow", deleting_since=0.0, node="alive"), Pod("no-node", node="", deleting_since=0.0)]
)
def test_other_pods_are_left_to_their_kubelet(pod: Pod) -> None:
    assert stuck_pods([pod], {"alive": NodeView("alive")}, NOW) == []


def raw_node(**status: Any) -> dict[str, Any]:
    metadata = {"name": "n1", "uid": "4f5c", "creationTimestamp": "2026-11-21T10:00:00Z", "labels": {"pool": "gpu"}}
    annotations = {"spotune.dev/cordoned-for": "why", "other": "x"}
    return {
        "metadata": metadata | {"annotations": annotations},
        "spec": {"providerID": "azure:///n1", "unschedulable": True},
        "status": status,
    }


def ready_condition(status: str) -> dict[str, str]:
    return {"type": "Ready", "status": status, "lastTransitionTime": "2026-11-21T11:00:00Z"}


def test_node_is_parsed() -> None:
    node = node_view(
        raw_node(
            capacity={"cpu": "8", "nvidia.com/gpu": "4"},
            allocatable={"cpu": "7800m", "nvidia.com/gpu": "3"},
            conditions=[{"type": "DiskPressure", "status": "False"}, ready_condition("True")],
        )
    )
    assert node == NodeView(
        "n1",
        provider_id="azure:///n1",
        unschedulable=True,
        gpu_capacity=4,
        gpu_allocatable=3,
        labels={"pool": "gpu"},
        created=node.created,
        annotations={"spotune.dev/cordoned-for": "why"},
        uid="4f5c",
    )


@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_a_node_is_not_ready_since_its_condition_changed(status: str) -> None:
    node = node_view(raw_node(conditions=[ready_condition(status)]))
    assert not node.ready
    assert node.not_ready_since == node.created + 3600


def test_node_that_was_never_ready_is_not_ready_since_its_creation() -> None:
    node = node_view(raw_node())
    assert (node.ready, node.not_ready_since, node.gpu_capacity) == (False, node.created, 0)
