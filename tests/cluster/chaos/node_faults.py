"""Faults of the node of a pod. All of them end after some seconds."""

from __future__ import annotations

import threading
from typing import Any

from spotune_testcluster import faults as network_faults
from spotune_testcluster.kubectl import KubectlError
from tests.cluster.chaos.target import Injection, Target

_SECONDS_OF_NOTICE = 8.0


def crashed(target: Target, pod: dict[str, Any], *, operator_restarts: bool = False) -> Injection:
    """SIGKILL to everything on the node."""
    node = target.node_of(pod)
    target.machine.crash_node(node)
    return Injection(node, lambda: target.machine.start_node(node), operator_restarts=operator_restarts)


def reclaimed(target: Target, pod: dict[str, Any]) -> Injection:
    """SIGTERM to its containers, and the end of the machine some seconds later."""
    node = target.node_of(pod)
    stopping = threading.Thread(target=target.machine.stop_node, args=(node, _SECONDS_OF_NOTICE), daemon=True)
    stopping.start()

    def start() -> None:
        stopping.join()
        target.machine.start_node(node)

    return Injection(node, start)


def drained(target: Target, pod: dict[str, Any], labels: str) -> Injection:
    """As `kubectl drain`, which evicts pods one by one, but only those with these labels."""
    node = target.node_of(pod)
    target.job.kubectl("cordon", node)
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=5s", f"--pod-selector={labels}")
    draining = threading.Thread(target=_drain, args=(target, node, flags), daemon=True)
    draining.start()

    def uncordon() -> None:
        draining.join()
        target.job.kubectl("uncordon", node)

    return Injection(node, uncordon)


def _drain(target: Target, node: str, flags: tuple[str, ...]) -> None:
    try:
        target.job.kubectl("drain", node, *flags)
    except KubectlError:  # it waits for the end of the pods, which is later
        return


def cut(target: Target, pod: dict[str, Any]) -> Injection:
    """The node loses its network link."""
    node = target.node_of(pod)
    network_faults.cut(target.machine, node)
    return Injection(node, lambda: network_faults.restore(target.machine, node))
