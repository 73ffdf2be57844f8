"""Faults of the head, of the operator and of KubeRay. Each returns the pods that it hits, as they were before."""

from __future__ import annotations

from tests.cluster.serving_faults.harness import ServingHarness
from tests.cluster.serving_faults.replicas import Pods, replica_container_killed

_KUBERAY = "kuberay-operator"


def head_pod_deleted(harness: ServingHarness) -> Pods:
    pods = harness.service.pods("head")
    harness.delete(pods)
    return pods


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
