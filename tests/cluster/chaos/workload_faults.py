"""Faults of processes, containers and pods of a job."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from spotune_testcluster.waiting import wait_for
from tests.cluster.chaos.schedule import FaultKind, PlannedFault
from tests.cluster.chaos.target import Inject, Injection, Target, name_of

_WORKER, _HEAD, _SUPERVISOR = "ray-worker", "ray-head", "supervisor"
_KUBERAY = "kuberay-operator"
_STOP_DRIVERS = """
import json, os, urllib.request
def call(method, path):
    request = urllib.request.Request("http://127.0.0.1:8265" + path, method=method)
    request.add_header("Authorization", "Bearer " + os.environ["RAY_AUTH_TOKEN"])
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)
running = [job for job in call("GET", "/api/jobs/") if job["status"] == "RUNNING"]
for job in running:
    call("POST", "/api/jobs/" + job["submission_id"] + "/stop")
    print(job["submission_id"])
raise SystemExit(0 if running else 1)
"""
"""By Ray's Jobs API, as somebody in its dashboard can."""


def _signal_worker(target: Target, fault: PlannedFault, signal: str, *pattern: str) -> dict[str, Any]:
    pod = target.worker(fault)
    target.execute(pod, _WORKER, "pkill", f"-{signal}", *pattern)
    return pod


def _rank_killed(target: Target, fault: PlannedFault) -> Injection:
    return Injection(name_of(_signal_worker(target, fault, "KILL", "spotune-rank")))


def _rank_paused(target: Target, fault: PlannedFault) -> Injection:
    pod = _signal_worker(target, fault, "STOP", "spotune-rank")

    def go_on() -> None:
        if any(found["metadata"]["uid"] == pod["metadata"]["uid"] for found in target.workers()):
            target.execute(pod, _WORKER, "bash", "-c", "pkill -CONT spotune-rank; true")

    return Injection(name_of(pod), go_on)


def _agent_killed(target: Target, fault: PlannedFault) -> Injection:
    return Injection(name_of(_signal_worker(target, fault, "KILL", "spotune-agent")))


def _raylet_killed(target: Target, fault: PlannedFault) -> Injection:
    return Injection(name_of(_signal_worker(target, fault, "KILL", "--exact", "raylet")))


def _worker_container_killed(target: Target, fault: PlannedFault) -> Injection:
    pod = target.worker(fault)
    target.node_of(pod)
    return target.kill(pod, _WORKER)


def _head_container_killed(target: Target, _fault: PlannedFault) -> Injection:
    pod = target.head()
    target.node_of(pod)
    return target.kill(pod, _HEAD)


def _supervisor_killed(target: Target, _fault: PlannedFault) -> Injection:
    pod = target.head()
    target.node_of(pod)
    return target.kill(pod, _SUPERVISOR)


def _gcs_killed(target: Target, _fault: PlannedFault) -> Injection:
    pod = target.head()
    target.execute(pod, _HEAD, "pkill", "-KILL", "--exact", "gcs_server")
    return Injection(name_of(pod))


def _driver_killed(target: Target, _fault: PlannedFault) -> Injection:
    pod = target.head()
    target.execute(pod, _HEAD, "pkill", "-KILL", "--full", "spotune_trainer.driver")
    return Injection(name_of(pod))


def _driver_stopped(target: Target, _fault: PlannedFault) -> Injection:
    return Injection(target.execute(target.head(), _SUPERVISOR, "python", "-c", _STOP_DRIVERS).strip())


def _worker_pod_deleted(target: Target, fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(target.worker(fault)))


def _worker_pod_forced(target: Target, fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(target.worker(fault), force=True))


def _worker_pods_forced(target: Target, _fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(*target.workers(), force=True))


def _head_pod_deleted(target: Target, _fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(target.head()))


def _head_pod_forced(target: Target, _fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(target.head(), force=True))


def _head_and_worker_deleted(target: Target, fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(target.head(), target.worker(fault)))


def _pods_forced(target: Target, _fault: PlannedFault) -> Injection:
    return Injection(target.delete_pods(target.head(), *target.workers(), force=True))


def _everything(target: Target, _fault: PlannedFault) -> Injection:
    pods = target.delete_pods(target.head(), *target.workers(), force=True)
    target.operator.delete_pod()
    target.machine.component("restart", _KUBERAY)

    def wait_until_back() -> None:
        wait_for("KubeRay", 60, lambda: target.machine.components()[_KUBERAY]["running"], every=0.5)

    return Injection(f"{pods}, operator, KubeRay", wait_until_back, operator_restarts=True)


FAULTS: Mapping[FaultKind, Inject] = MappingProxyType(
    {
        FaultKind.RANK_KILLED: _rank_killed,
        FaultKind.RANK_PAUSED: _rank_paused,
        FaultKind.AGENT_KILLED: _agent_killed,
        FaultKind.RAYLET_KILLED: _raylet_killed,
        FaultKind.WORKER_CONTAINER_KILLED: _worker_container_killed,
        FaultKind.HEAD_CONTAINER_KILLED: _head_container_killed,
        FaultKind.GCS_KILLED: _gcs_killed,
        FaultKind.SUPERVISOR_KILLED: _supervisor_killed,
        FaultKind.DRIVER_KILLED: _driver_killed,
        FaultKind.DRIVER_STOPPED: _driver_stopped,
        FaultKind.WORKER_POD_DELETED: _worker_pod_deleted,
        FaultKind.WORKER_POD_FORCED: _worker_pod_forced,
        FaultKind.WORKER_PODS_FORCED: _worker_pods_forced,
        FaultKind.HEAD_POD_DELETED: _head_pod_deleted,
        FaultKind.HEAD_POD_FORCED: _head_pod_forced,
        FaultKind.HEAD_AND_WORKER_DELETED: _head_and_worker_deleted,
        FaultKind.PODS_FORCED: _pods_forced,
        FaultKind.EVERYTHING: _everything,
    }
)
