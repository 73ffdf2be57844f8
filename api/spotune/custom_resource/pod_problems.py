"""Why a pod does not start, or cannot be created: one reason and one sentence out of all that Kubernetes reports.

The texts are those of the scheduler, the kubelet and the API server. What differs between two reports of the same
problem is removed (names of pods that were never created, lengths of pauses), so that the message stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spotune.custom_resource.pod_requests import describe_requests

UNSCHEDULABLE: Final = "Unschedulable"
"""Reason of a pod that fits no node."""
_BACK_OFF: Final = re.compile(r'^Back-off pulling image "[^"]*": (ErrImagePull: )?')
"""What the kubelet puts before its last error while it waits for the next attempt."""
_REJECTED: Final = re.compile(r'^(?:pods|Pod) "[^"]*" is (?:forbidden|invalid): ')
"""The beginning of a rejection by the API server, with the name of the pod: another one at each attempt."""
_NORMAL_REASONS: Final = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of containers that are starting normally."""
_PULLING: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
_OUT_OF_MEMORY: Final = "OOMKilled"
_NEVER_STARTED: Final = "StartError"
_NOT_SYNCED: Final = re.compile(r"^failed to sync (secret|configmap) cache: ")
"""The kubelet has not heard from the API server yet. It tries again by itself."""


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not start.

    Attributes:
        reason: The reason of the kubelet, the scheduler or KubeRay, or a more exact one of ours; becomes the
            ``reason`` of a condition.
        message: A sentence for people.
    """

    reason: str
    message: str


def pod_problem(raw: Mapping[str, Any]) -> PodProblem | None:
    """Why a pod does not start, or why KubeRay cannot create the pods of a RayCluster.

    Args:
        raw: A ``v1.Pod`` or a ``RayCluster`` of the API server.

    Returns:
        None if no problem is known: the pod runs, or is starting. Of several problems the most actionable one: images,
        then Secrets and ConfigMaps, then containers that fail, then the pod as a whole.
    """
    status = raw.get("status") or {}
    found = [*_containers(raw, status), *_pod(raw, status), *_cluster(status)]
    return min(found, key=_rank, default=None)


def _rank(problem: PodProblem) -> int:
    """Rank of a problem; 0 is the most actionable: its message names what to change."""
    if problem.reason in _PULLING or "Image" in problem.reason:
        return 0
    if problem.reason == "CreateContainerConfigError":
        return 1
    return 3 if problem.reason in ("CrashLoopBackOff", UNSCHEDULABLE, "SchedulingGated") else 2


def _containers(raw: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[PodProblem]:
    namespace = raw["metadata"].get("namespace", "default")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if not reason or reason in _NORMAL_REASONS:
            continue
        before = (container.get("lastState") or {}).get("terminated") or {}
        if reason == "CrashLoopBackOff" and before.get("reason") == _NEVER_STARTED:
            reason, waiting = "RunContainerError", before  # the same problem, reported between two attempts
        if _NOT_SYNCED.match(waiting.get("message", "")):
            reason = "ConfigNotSynced"
        message = _container_message(reason, waiting.get("message", ""), before, container.get("image", ""), namespace)
        yield PodProblem("ErrImagePull" if reason in _PULLING else reason, f"container {container['name']}: {message}")


def _container_message(reason: str, message: str, before: Mapping[str, Any], image: str, namespace: str) -> str:
    """The problem of one container, without its name.

    Args:
        reason: ``waiting.reason`` of its state.
        message: ``waiting.message`` of its state.
        before: ``terminated`` of its last state.
        image: Its image.
        namespace: The pod's namespace.
    """
    if reason in _PULLING:
        return f"image {image} cannot be pulled: {_BACK_OFF.sub('', message)}"
    if reason == "CreateContainerConfigError" and message.endswith("not found"):
        return f"{message} in namespace {namespace}: create it, or change its name in the spec"
    if reason == "ConfigNotSynced":
        return f"the node waits for its Secrets and ConfigMaps, and tries again: {message}"
    if reason == "RunContainerError":
        return f"cannot start: {message}"
    if reason != "CrashLoopBackOff":
        return message or reason
    if before.get("reason") == _OUT_OF_MEMORY:
        return "exceeded its memory limit and was killed: raise resources.limits.memory"
    details = f": {before['message'].strip()}" if before.get("message") else ", see its logs"
    return f"crashes repeatedly, last with exit code {before.get('exitCode', 'unknown')}{details}"


def _pod(raw: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[PodProblem]:
    if status.get("phase") == "Failed" and status.get("reason"):
        # UnexpectedAdmissionError, OutOfnvidia.com/gpu, Evicted: the kubelet rejected or evicted it.
        reason = re.sub(r"[^A-Za-z0-9]", "", status["reason"])
        yield PodProblem(reason, f"the node rejected or evicted the pod: {status.get('message') or status['reason']}")
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason, spec = condition.get("reason") or UNSCHEDULABLE, raw.get("spec") or {}
            requests = describe_requests(spec) if reason == UNSCHEDULABLE else ""
            asks_for = f"the pod asks for {requests}; " if requests else ""
            gates = [gate["name"] for gate in spec.get("schedulingGates") or ()]
            waits_for = f": {', '.join(gates)}" if gates else ""
            yield PodProblem(reason, f"{asks_for}{condition.get('message') or 'the pod has no node yet'}{waits_for}")


def _cluster(status: Mapping[str, Any]) -> Iterator[PodProblem]:
    """KubeRay's condition ``ReplicaFailure``: its message is the reason, a line break, and the API server's message."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            reason = condition["reason"]
            text = condition.get("message", "").removeprefix(reason).strip()
            kept = _REJECTED.sub("", text)
            reason = "QuotaExceeded" if kept.startswith("exceeded quota") else reason
            yield PodProblem(
                reason, f"{_ATTEMPTS.get(condition['reason'], 'KubeRay failed')}: {kept or text or reason}"
            )


_ATTEMPTS: Final = {
    "FailedCreateHeadPod": "the head pod cannot be created",
    "FailedCreateWorkerPod": "worker pods cannot be created",
    "FailedDeleteHeadPod": "the head pod cannot be deleted",
    "FailedDeleteWorkerPod": "worker pods cannot be deleted",
    "FailedDeleteAllPods": "the cluster's pods cannot be deleted",
}
"""What failed, by KubeRay's reason (``errRayClusterReplicaFailure`` in its constant.go)."""
