"""SIGKILL for what runs in a pod, from outside: PID 1 of a container hears no SIGKILL from within."""

from typing import Any

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.waiting import wait_for


def kill_container(machine: Cluster, pod: dict[str, Any], container: str) -> None:
    """`kill -9` of a container's first process, and so of all in it; the kubelet starts it again."""
    status = container_status(pod, container)
    _, _, identity = status["containerID"].partition("://")
    kill = ("ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", identity)
    machine.enter(*kill, node=pod["spec"]["nodeName"])


def container_status(pod: dict[str, Any], container: str) -> dict[str, Any]:
    """What the kubelet says of one of a pod's containers."""
    found: list[dict[str, Any]] = pod["status"].get("containerStatuses", [])
    (status,) = [status for status in found if status["name"] == container]
    return status


def wait_for_restart(kubectl: Kubectl, pod: dict[str, Any], container: str) -> None:
    """Wait until a container has been started once more than `pod` says, and runs."""
    before = container_status(pod, container)["restartCount"]

    def restarted() -> bool:
        status = container_status(kubectl.get("pod", pod["metadata"]["name"]), container)
        return status["restartCount"] > before and "running" in status["state"]

    wait_for(f"restart of {container} in {pod['metadata']['name']}", 120, restarted, every=0.3)
