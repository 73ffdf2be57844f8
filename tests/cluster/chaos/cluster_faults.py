"""Faults of nodes, of the operator and of the control plane. All of them end after some seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType

from tests.cluster.chaos import node_faults
from tests.cluster.chaos.errors import NothingToHitError
from tests.cluster.chaos.schedule import FaultKind, PlannedFault
from tests.cluster.chaos.target import Inject, Injection, Target
from tests.cluster.containers import kill_container
from tests.cluster.operator_install import CONTAINER, DEPLOYMENT

_API_SERVER = "kube-apiserver"
_ANNOUNCED = "aws-node-termination-handler/spot-itn"
"""The taint by which AWS's handler announces that a spot node ends; it moves no pods by itself."""


def _worker_node_crashed(target: Target, fault: PlannedFault) -> Injection:
    return node_faults.crashed(target, target.worker(fault))


def _worker_nodes_crashed(target: Target, _fault: PlannedFault) -> Injection:
    nodes = sorted({pod["spec"]["nodeName"] for pod in target.workers()})
    nodes = [node for node in nodes if target.machine.nodes().get(node)]
    if not nodes:
        raise NothingToHitError("no node has workers")
    for node in nodes:
        target.machine.crash_node(node)

    def start() -> None:
        for node in nodes:
            target.machine.start_node(node)

    return Injection(" ".join(nodes), start)


def _worker_node_reclaimed(target: Target, fault: PlannedFault) -> Injection:
    return node_faults.reclaimed(target, target.worker(fault))


def _worker_node_drained(target: Target, fault: PlannedFault) -> Injection:
    return node_faults.drained(target, target.worker(fault), f"spotune.dev/job={target.job.name}")


def _worker_node_cut(target: Target, fault: PlannedFault) -> Injection:
    return node_faults.cut(target, target.worker(fault))


def _notice_alone(target: Target, fault: PlannedFault) -> Injection:
    node = target.node_of(target.worker(fault))
    target.job.kubectl("taint", "node", node, f"{_ANNOUNCED}=true:NoSchedule", "--overwrite")

    def remove() -> None:
        if _ANNOUNCED in target.job.kubectl("get", "node", node, "--output=json"):
            target.job.kubectl("taint", "node", node, f"{_ANNOUNCED}-")

    return Injection(node, remove)


def _notice_and_crash(target: Target, fault: PlannedFault) -> Injection:
    notice = _notice_alone(target, fault)

    def crash_and_start() -> None:
        if target.machine.nodes().get(notice.what):
            target.machine.crash_node(notice.what)
        time.sleep(fault.seconds)
        target.machine.start_node(notice.what)
        notice.undo()

    return Injection(notice.what, crash_and_start)


def _head_node_crashed(target: Target, _fault: PlannedFault) -> Injection:
    """The operator is on the same node, the only one that is neither of spot capacity nor spared."""
    return node_faults.crashed(target, target.head(), operator_restarts=True)


def _operator_killed(target: Target, _fault: PlannedFault) -> Injection:
    running = [pod for pod in target.operator.pods() if pod["status"].get("phase") == "Running"]
    if not running:
        raise NothingToHitError("the operator does not run")
    target.node_of(running[0])
    kill_container(target.machine, running[0], CONTAINER)
    return Injection(running[0]["metadata"]["name"], operator_restarts=True)


def _operator_pod_deleted(target: Target, _fault: PlannedFault) -> Injection:
    if not target.operator.pods():
        raise NothingToHitError("the operator has no pod")
    target.operator.delete_pod()
    return Injection("its pod", operator_restarts=True)


def _operator_down(target: Target, _fault: PlannedFault) -> Injection:
    def scale(replicas: int) -> None:
        target.operator.kubectl("scale", f"deployment/{DEPLOYMENT}", f"--replicas={replicas}")

    scale(0)
    return Injection("no replica", lambda: scale(1), operator_restarts=True)


def _operator_cut(target: Target, _fault: PlannedFault) -> Injection:
    cut = ExitStack()
    cut.enter_context(target.operator.cut_off_from_pods())
    return Injection("its egress", cut.close, operator_is_blind=True)


def _api_server_paused(target: Target, _fault: PlannedFault) -> Injection:
    target.machine.component("pause", _API_SERVER)
    return Injection(_API_SERVER, lambda: target.machine.component("continue", _API_SERVER), operator_is_blind=True)


def _api_server_restarted(target: Target, _fault: PlannedFault) -> Injection:
    target.machine.component("restart", _API_SERVER)
    return Injection(_API_SERVER, operator_is_blind=True)


def _without(component: str) -> Inject:
    def stop(target: Target, _fault: PlannedFault) -> Injection:
        target.machine.component("stop", component)
        return Injection(component, lambda: target.machine.component("start", component))

    return stop


FAULTS: Mapping[FaultKind, Inject] = MappingProxyType(
    {
        FaultKind.WORKER_NODE_CRASHED: _worker_node_crashed,
        FaultKind.WORKER_NODES_CRASHED: _worker_nodes_crashed,
        FaultKind.WORKER_NODE_RECLAIMED: _worker_node_reclaimed,
        FaultKind.WORKER_NODE_DRAINED: _worker_node_drained,
        FaultKind.WORKER_NODE_CUT: _worker_node_cut,
        FaultKind.NOTICE_ALONE: _notice_alone,
        FaultKind.NOTICE_AND_CRASH: _notice_and_crash,
        FaultKind.HEAD_NODE_CRASHED: _head_node_crashed,
        FaultKind.OPERATOR_KILLED: _operator_killed,
        FaultKind.OPERATOR_POD_DELETED: _operator_pod_deleted,
        FaultKind.OPERATOR_DOWN: _operator_down,
        FaultKind.OPERATOR_CUT: _operator_cut,
        FaultKind.API_SERVER_PAUSED: _api_server_paused,
        FaultKind.API_SERVER_RESTARTED: _api_server_restarted,
        FaultKind.KUBERAY_DOWN: _without("kuberay-operator"),
        FaultKind.SCHEDULER_DOWN: _without("kube-scheduler"),
        FaultKind.CONTROLLERS_DOWN: _without("kube-controller-manager"),
    }
)
