"""Faults of replicas and of their nodes. Each returns the pods that it hits, as they were before."""

from __future__ import annotations

import time
from typing import Any

from spotune.custom_resource.object_names import WORKER_CONTAINER
from spotune_testcluster.waiting import wait_for
from tests.cluster.containers import kill_container
from tests.cluster.serving_faults.harness import ServingHarness

Pods = list[dict[str, Any]]
_NOTICE_SECONDS = 30.0
_REPLICA_PROCESS = "ray::ServeReplica.*Replica"


def replica_container_killed(harness: ServingHarness) -> Pods:
    return _kill_containers(harness, 1)


def replica_pod_deleted(harness: ServingHarness) -> Pods:
    pods = harness.service.pods("replicas")[:1]
    harness.delete(pods)
    return pods


def spread_replicas(harness: ServingHarness) -> None:
    """Let each replica have a node of its own: an earlier fault may have left both on one."""
    pods = harness.service.pods("replicas")
    on_first = [pod for pod in pods if pod["spec"]["nodeName"] == pods[0]["spec"]["nodeName"]]
    if len(on_first) > 1:
        harness.delete(on_first[1:])
        harness.wait_until_replaced(on_first[1:])
    nodes = {pod["spec"]["nodeName"] for pod in harness.service.pods("replicas")}
    assert len(nodes) == len(pods), f"{len(pods)} replicas on {nodes}"


def node_of_a_replica_crashed(harness: ServingHarness) -> Pods:
    pods = _on_one_node(harness)
    harness.fault.crash_node(pods[0]["spec"]["nodeName"])
    return pods


def node_of_a_replica_reclaimed(harness: ServingHarness) -> Pods:
    """SIGTERM to its containers, and the end of the machine after 30 seconds."""
    pods = _on_one_node(harness)
    harness.fault.stop_node(pods[0]["spec"]["nodeName"], _NOTICE_SECONDS)
    return pods


def node_of_a_replica_drained(harness: ServingHarness) -> Pods:
    pods = _on_one_node(harness)
    node = pods[0]["spec"]["nodeName"]
    harness.cluster.kubectl("cordon", node)
    try:
        harness.delete(pods)
        wait_for("the end of the replica", 180, lambda: _are_gone(harness, pods), every=0.5)
    finally:
        harness.cluster.kubectl("uncordon", node)
    return pods


def all_replicas_killed(harness: ServingHarness) -> Pods:
    return _kill_containers(harness, len(harness.service.pods("replicas")))


def replica_killed_twice(harness: ServingHarness) -> Pods:
    """The streams of the first replica continue at the second, which is killed two seconds later."""
    first, second = harness.service.pods("replicas")
    machine = harness.machine("kill -9 of a container")
    kill_container(machine, first, WORKER_CONTAINER)
    time.sleep(2)  # the second kill is to hit what the first one moved
    kill_container(machine, second, WORKER_CONTAINER)
    return [first, second]


def _kill_containers(harness: ServingHarness, count: int) -> Pods:
    machine = harness.machine("kill -9 of a container")
    pods = harness.service.pods("replicas")[:count]
    for pod in pods:
        kill_container(machine, pod, WORKER_CONTAINER)
    return pods


def _on_one_node(harness: ServingHarness) -> Pods:
    """The replicas on the node of the first one."""
    pods = harness.service.pods("replicas")
    return [pod for pod in pods if pod["spec"]["nodeName"] == pods[0]["spec"]["nodeName"]]


def _are_gone(harness: ServingHarness, pods: Pods) -> bool:
    uids = {pod["metadata"]["uid"] for pod in harness.kubectl.get("pods")}
    return not uids & {pod["metadata"]["uid"] for pod in pods}
