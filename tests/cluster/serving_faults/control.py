"""Faults of the head, of the operator and of KubeRay. Each returns the pods that it hits, as they were before."""

from __future__ import annotations

from spotune_testcluster.providers import Provider
from spotune_testcluster.settings import NodeSettings
from spotune_testcluster.waiting import wait_for
from tests.cluster.serving_faults.harness import ServingHarness
from tests.cluster.serving_faults.replicas import Pods, replica_container_killed

_KUBERAY = "kuberay-operator"
_NODE_OF_THE_HEAD = NodeSettings(number=5, provider=Provider.AKS, zone="westeurope-2")


def head_pod_deleted(harness: ServingHarness) -> Pods:
    pods = harness.service.pods("head")
    harness.delete(pods)
    return pods


def move_head(harness: ServingHarness) -> None:
    """Move the head to a node without gateways and clients."""
    machine = harness.machine("another node")
    machine.add_node(_NODE_OF_THE_HEAD)
    others = [name for name in machine.nodes() if name != _NODE_OF_THE_HEAD.name]
    (old,) = harness.service.pods("head")
    harness.cluster.kubectl("cordon", *others)
    try:
        harness.delete([old])
        wait_for("the head on its node", 180, lambda: _node_of_the_head(harness) == _NODE_OF_THE_HEAD.name, every=0.5)
    finally:
        harness.cluster.kubectl("uncordon", *others)
    harness.wait_until_replaced([old])


def _node_of_the_head(harness: ServingHarness) -> str:
    return next((str(pod["spec"].get("nodeName", "")) for pod in harness.service.pods("head")), "")


def node_of_the_head_crashed(harness: ServingHarness) -> Pods:
    pods = harness.service.pods("head")
    harness.fault.crash_node(pods[0]["spec"]["nodeName"])
    return pods


def operator_down_during_a_loss(harness: ServingHarness) -> Pods:
    harness.operator.stop()
    try:
        return replica_container_killed(harness)
    finally:
        harness.operator.start()


def kuberay_restarted(harness: ServingHarness) -> Pods:
    harness.machine("a restart of KubeRay").component("restart", _KUBERAY)
    return []


def kuberay_down_during_a_loss(harness: ServingHarness) -> Pods:
    harness.fault.stop_component(_KUBERAY)
    try:
        return replica_container_killed(harness)
    finally:
        harness.fault.start_component(_KUBERAY)
