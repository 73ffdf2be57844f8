"""Faults of the service: its replicas, their nodes, its head with Ray Serve's controller, its Redis, its object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from spotune.custom_resource.object_names import WORKER_CONTAINER
from tests.cluster.chaos import node_faults
from tests.cluster.chaos.errors import NothingToHitError
from tests.cluster.chaos.schedule import FaultKind, PlannedFault
from tests.cluster.chaos.target import Inject, Injection, Target, choose, name_of
from tests.cluster.containers import kill_container
from tests.cluster.redis import NAME as REDIS

REPLICAS_OF_A_STRANGER: Final = 77
"""No service has so many replicas, so a status with them is one that a stranger has written."""
_HEAD = "ray-head"
_REPLICA = "ray::ServeReplica"
_CONTROLLER = "ray::ServeController"


def _replica(target: Target, fault: PlannedFault) -> dict[str, Any]:
    return choose("a replica pod on a node", target.service.pods("replicas"), fault.target)


def _head(target: Target) -> dict[str, Any]:
    return choose("a head pod of the service on a node", target.service.pods("head"))


def _kill_in(target: Target, pod: dict[str, Any], container: str, *pattern: str) -> Injection:
    target.execute(pod, container, "pkill", "-KILL", *pattern)
    return Injection(name_of(pod))


def _replica_process_killed(target: Target, fault: PlannedFault) -> Injection:
    return _kill_in(target, _replica(target, fault), WORKER_CONTAINER, "--full", _REPLICA)


def _replica_container_killed(target: Target, fault: PlannedFault) -> Injection:
    pod = _replica(target, fault)
    target.node_of(pod)
    return target.kill(pod, WORKER_CONTAINER)


def _replica_containers_killed(target: Target, _fault: PlannedFault) -> Injection:
    killed = [_killed(target, pod) for pod in target.service.pods("replicas")]
    if not any(killed):
        raise NothingToHitError("no container of a replica runs")
    return Injection(" ".join(filter(None, killed)))


def _killed(target: Target, pod: dict[str, Any]) -> str:
    try:
        target.node_of(pod)
        return target.kill(pod, WORKER_CONTAINER).what
    except NothingToHitError:
        return ""


def _replica_raylet_killed(target: Target, fault: PlannedFault) -> Injection:
    return _kill_in(target, _replica(target, fault), WORKER_CONTAINER, "--exact", "raylet")


def _replica_pod_deleted(target: Target, fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(_replica(target, fault)))


def _replica_pod_forced(target: Target, fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(_replica(target, fault), force=True))


def _replica_node_crashed(target: Target, fault: PlannedFault) -> Injection:
    return node_faults.crashed(target, _replica(target, fault))


def _replica_node_reclaimed(target: Target, fault: PlannedFault) -> Injection:
    return node_faults.reclaimed(target, _replica(target, fault))


def _replica_node_drained(target: Target, fault: PlannedFault) -> Injection:
    return node_faults.drained(target, _replica(target, fault), f"spotune.dev/service={target.service.running.name}")


def _replica_node_cut(target: Target, fault: PlannedFault) -> Injection:
    return node_faults.cut(target, _replica(target, fault))


def _serve_controller_killed(target: Target, _fault: PlannedFault) -> Injection:
    return _kill_in(target, _head(target), _HEAD, "--full", _CONTROLLER)


def _serve_gcs_killed(target: Target, _fault: PlannedFault) -> Injection:
    return _kill_in(target, _head(target), _HEAD, "--exact", "gcs_server")


def _serve_head_container_killed(target: Target, _fault: PlannedFault) -> Injection:
    pod = _head(target)
    target.node_of(pod)
    return target.kill(pod, _HEAD)


def _serve_head_pod_deleted(target: Target, _fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(_head(target)))


def _serve_head_pod_forced(target: Target, _fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(_head(target), force=True))


def _redis_paused(target: Target, _fault: PlannedFault) -> Injection:
    pod = target.job.kubectl.get("pod", REDIS)
    kill_container(target.machine, pod, "main", "SIGSTOP")
    return Injection(REDIS, lambda: kill_container(target.machine, pod, "main", "SIGCONT"))


def _service_applied_again(target: Target, _fault: PlannedFault) -> Injection:
    target.service.apply_as("gitops")
    return Injection("the manifest of the beginning")


def _service_status_patched(target: Target, _fault: PlannedFault) -> Injection:
    patch = f"--patch={json.dumps({'status': {'readyReplicas': REPLICAS_OF_A_STRANGER}})}"
    name = target.service.running.name
    target.job.kubectl("patch", "modelservice", name, "--subresource=status", "--type=merge", patch)
    return Injection("readyReplicas")


FAULTS: Mapping[FaultKind, Inject] = MappingProxyType(
    {
        FaultKind.REPLICA_PROCESS_KILLED: _replica_process_killed,
        FaultKind.REPLICA_CONTAINER_KILLED: _replica_container_killed,
        FaultKind.REPLICA_CONTAINERS_KILLED: _replica_containers_killed,
        FaultKind.REPLICA_RAYLET_KILLED: _replica_raylet_killed,
        FaultKind.REPLICA_POD_DELETED: _replica_pod_deleted,
        FaultKind.REPLICA_POD_FORCED: _replica_pod_forced,
        FaultKind.REPLICA_NODE_CRASHED: _replica_node_crashed,
        FaultKind.REPLICA_NODE_RECLAIMED: _replica_node_reclaimed,
        FaultKind.REPLICA_NODE_DRAINED: _replica_node_drained,
        FaultKind.REPLICA_NODE_CUT: _replica_node_cut,
        FaultKind.SERVE_CONTROLLER_KILLED: _serve_controller_killed,
        FaultKind.SERVE_GCS_KILLED: _serve_gcs_killed,
        FaultKind.SERVE_HEAD_CONTAINER_KILLED: _serve_head_container_killed,
        FaultKind.SERVE_HEAD_POD_DELETED: _serve_head_pod_deleted,
        FaultKind.SERVE_HEAD_POD_FORCED: _serve_head_pod_forced,
        FaultKind.REDIS_PAUSED: _redis_paused,
        FaultKind.SERVICE_APPLIED_AGAIN: _service_applied_again,
        FaultKind.SERVICE_STATUS_PATCHED: _service_status_patched,
    }
)
