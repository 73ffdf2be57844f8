"""Containers of a pod from outside: their ends, and what they print until then."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.waiting import wait_for


def kill_container(machine: Cluster, pod: dict[str, Any], container: str, signal: str = "SIGKILL") -> None:
    """`kill -9` of a container's first process, which ends all of them; the kubelet restarts the container.

    SIGKILL from inside the container does not reach that process. Another signal may be sent instead.
    """
    status = container_status(pod, container)
    _, _, identity = status["containerID"].partition("://")
    kill = ("ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", signal, identity)
    machine.enter(*kill, node=pod["spec"]["nodeName"])


def container_status(pod: dict[str, Any], container: str) -> dict[str, Any]:
    """The status of one container of a pod, as the kubelet reports it."""
    found: list[dict[str, Any]] = pod["status"].get("containerStatuses", [])
    (status,) = [status for status in found if status["name"] == container]
    return status


def wait_for_restart(kubectl: Kubectl, pod: dict[str, Any], container: str) -> None:
    """Wait until a container has restarted since `pod` was read, and is running."""
    before = container_status(pod, container)["restartCount"]

    def restarted() -> bool:
        status = container_status(kubectl.get("pod", pod["metadata"]["name"]), container)
        return status["restartCount"] > before and "running" in status["state"]

    wait_for(f"restart of {container} in {pod['metadata']['name']}", 120, restarted, every=0.3)


@contextmanager
def follow_log(kubectl: Kubectl, pod: dict[str, Any], container: str, file: Path) -> Iterator[None]:
    """Write the log of a container that has printed something to a file.

    After the block, in which the pod ends, the file has all of it.
    """
    command = kubectl.command("logs", "--follow", pod["metadata"]["name"], f"--container={container}")
    with file.open("w") as log, subprocess.Popen(command, stdout=log) as process:
        wait_for(f"the log of {container}", 60, lambda: file.stat().st_size > 0)
        yield
        process.wait(timeout=120)
