"""Why a pod does not start, or cannot even be made: one reason and one sentence, out of all that Kubernetes says.

The words are those of the scheduler, the kubelet and the API server, without what differs from one look to the next
(names of pods that were never made, lengths of pauses): while the trouble is the same, so is what is said about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_BACK_OFF: Final = re.compile(r'^Back-off pulling image "[^"]*": (ErrImagePull: )?')
"""What the kubelet puts before its last error while it pauses between two tries."""
_REFUSED: Final = re.compile(r'^(?:pods|Pod) "[^"]*" is (?:forbidden|invalid): ')
"""How the API server begins, with the name that a pod would have had: another one at each try."""
_AT_WORK: Final = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of containers that wait for nothing but their turn."""
_PULLING: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
_OUT_OF_MEMORY: Final = "OOMKilled"
_NEVER_STARTED: Final = "StartError"


@dataclass(frozen=True)
class Trouble:
    """What keeps a pod from starting.

    Attributes:
        reason: One word, as the kubelet, the scheduler or KubeRay has it; for ``reason`` of a ``metav1.Condition``.
        message: A sentence for people.
    """

    reason: str
    message: str


def explain_pending(raw: Mapping[str, Any]) -> Trouble | None:
    """Why a pod does not start, or why KubeRay cannot make the pods of a cluster.

    Args:
        raw: A ``v1.Pod`` or a ``RayCluster``, as the API server has it.

    Returns:
        None if nothing is known to be wrong: it runs, or it only has not had the time yet. Of several troubles the
        one that says most about what to do: images, then Secrets and ConfigMaps, then containers that end or cannot be
        started, then the pod as a whole.
    """
    status = raw.get("status") or {}
    found = [*_containers(raw, status), *_pod(raw, status), *_cluster(status)]
    return min(found, key=_rank, default=None)


def _rank(trouble: Trouble) -> int:
    """How little a trouble says: 0 for those whose message names what to change."""
    if trouble.reason in _PULLING or "Image" in trouble.reason:
        return 0
    if trouble.reason == "CreateContainerConfigError":
        return 1
    return 3 if trouble.reason in ("CrashLoopBackOff", "Unschedulable", "SchedulingGated") else 2


def _containers(raw: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[Trouble]:
    namespace = raw["metadata"].get("namespace", "default")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if not reason or reason in _AT_WORK:
            continue
        before = (container.get("lastState") or {}).get("terminated") or {}
        if reason == "CrashLoopBackOff" and before.get("reason") == _NEVER_STARTED:
            reason, waiting = "RunContainerError", before  # the same trouble, seen in the pause between two tries
        why = _why(reason, waiting.get("message", ""), before, container.get("image", ""), namespace)
        yield Trouble("ErrImagePull" if reason in _PULLING else reason, f"container {container['name']}: {why}")


def _why(reason: str, message: str, before: Mapping[str, Any], image: str, namespace: str) -> str:
    """A clause about one container.

    Args:
        reason: Of the container's waiting.
        message: Of the same.
        before: ``terminated`` of its last state.
        image: Of the container.
        namespace: Of the pod.
    """
    if reason in _PULLING:
        return f"image {image} cannot be pulled: {_BACK_OFF.sub('', message)}"
    if reason == "CreateContainerConfigError" and message.endswith("not found"):
        return f"{message} in namespace {namespace}: create it, or name another one in the job"
    if reason == "RunContainerError":
        return f"cannot be started: {message}"
    if reason != "CrashLoopBackOff":
        return message or reason
    if before.get("reason") == _OUT_OF_MEMORY:
        return "was killed for using more memory than its limit: raise resources.limits.memory"
    said = f": {before['message'].strip()}" if before.get("message") else ", see its logs"
    return f"ends again and again, last with exit code {before.get('exitCode', 'unknown')}{said}"


def _pod(raw: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[Trouble]:
    if status.get("phase") == "Failed" and status.get("reason"):
        # UnexpectedAdmissionError, OutOfnvidia.com/gpu, Evicted: the kubelet would not have it, or not any more.
        reason = re.sub(r"[^A-Za-z0-9]", "", status["reason"])
        yield Trouble(reason, f"the node refused or ended it: {status.get('message') or status['reason']}")
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = condition.get("reason") or "Unschedulable"
            gates = [gate["name"] for gate in (raw.get("spec") or {}).get("schedulingGates") or ()]
            waits_for = f": {', '.join(gates)}" if gates else ""
            yield Trouble(reason, f"{condition.get('message') or 'has no node yet'}{waits_for}")


def _cluster(status: Mapping[str, Any]) -> Iterator[Trouble]:
    """KubeRay's ``ReplicaFailure``: its message is its reason, a line break, and the words of the API server."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            reason = condition["reason"]
            words = condition.get("message", "").removeprefix(reason).strip()
            kept = _REFUSED.sub("", words)
            reason = "QuotaExceeded" if kept.startswith("exceeded quota") else reason
            yield Trouble(reason, f"{_ATTEMPTS.get(condition['reason'], 'KubeRay failed')}: {kept or words or reason}")


_ATTEMPTS: Final = {
    "FailedCreateHeadPod": "the head pod cannot be made",
    "FailedCreateWorkerPod": "worker pods cannot be made",
    "FailedDeleteHeadPod": "the head pod cannot be deleted",
    "FailedDeleteWorkerPod": "worker pods cannot be deleted",
    "FailedDeleteAllPods": "the cluster's pods cannot be deleted",
}
"""What KubeRay was doing, by its reason (``errRayClusterReplicaFailure`` in KubeRay's constant.go)."""
