"""Kubernetes Events of a job: one for each notable transition of a condition, each restart and each resize.

The name of an Event is a hash of what it reports. If the operator crashes after it has written an Event and before it
has written the status, it writes the same Event again, and not a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spotune.custom_resource import API_VERSION, Condition
from spotune.job import KIND, FinetuneJobStatus
from spotune.units.timestamps import rfc3339
from spotune_operator.kube.conditions import Finding, find, referenced, with_cause
from spotune_operator.kube.digest import digest
from spotune_operator.observe.caches import CachedJob
from spotune_operator.observe.supervisor_status import ACTIVE_PHASES
from spotune_operator.reconcile.limits.fewer_workers import desired_count

_CAUSES: Final = {
    "worker_lost": "a worker was lost",
    "head_lost": "the head was lost",
    "preempted": "a node was reclaimed",
    "hang": "the workers sent no heartbeat",
    "app_error": "the model, the data or the code failed",
    "out_of_memory": "a worker ran out of memory",
}
_HEAD_REPLACED: Final = "the head was replaced; training went on without a lost step"
_WITH_WORKERS: Final = frozenset({"Loading", *ACTIVE_PHASES, "Complete"})
"""Phases in which a worker group runs, or has run to its end."""
_ROUTINE: Final = frozenset(
    {"Reconciling", "ClusterReady", "DataPrepared", "Training", "CheckpointHealthy", "ReplicasReady", "NodesFit"}
)
"""Conditions whose transitions are routine, or are reported for ``Ready``, or for each node."""
_ROLLED_OUT: Final = "RolledOut"
_MAX_MESSAGE_LENGTH: Final = 1000


@dataclass(frozen=True)
class Involved:
    """The object that an Event is about.

    Attributes:
        kind: Its kind.
        namespace: Its namespace.
        name: Its name.
        uid: Its uid.
    """

    kind: str
    namespace: str
    name: str
    uid: str


def job_events(
    job: CachedJob, previous: FinetuneJobStatus, status: FinetuneJobStatus, now: float
) -> Iterator[dict[str, Any]]:
    """The ``v1.Event``s for the difference of two statuses of a job.

    Args:
        job: The FinetuneJob.
        previous: The status before.
        status: The status now.
        now: Unix time.
    """
    involved = Involved(KIND, job.namespace, job.name, job.uid)
    yield from condition_events(involved, previous.conditions, status.conditions, now)
    yield from node_events(involved, previous, status, now)
    before, after = desired_count(previous.workers), desired_count(status.workers)
    if before is not None and after is not None and before != after:
        message = f"workers.count was changed from {before} to {after}"
        about = (str(before), str(after), str(status.observed_generation))
        yield event_manifest(involved, "Resized", message, now, about, warning=False)
    for cause, description in _CAUSES.items():
        count = getattr(status.restarts, cause)
        if count > getattr(previous.restarts, cause):
            if cause == "head_lost" and _trained_on(previous, status):
                yield event_manifest(involved, "HeadReplaced", _HEAD_REPLACED, now, (cause, str(count)), warning=False)
                continue
            step = f"; training continues from step {status.last_checkpoint.step}" if status.last_checkpoint else ""
            yield event_manifest(involved, "Restarted", f"{description}{step}", now, (cause, str(count)), warning=True)


def _trained_on(previous: FinetuneJobStatus, status: FinetuneJobStatus) -> bool:
    """Whether the workers have outlived a head. Its loss is counted once the next driver has found them, or has not."""
    return status.generation == previous.generation and status.phase in _WITH_WORKERS


def node_events(
    involved: Involved, previous: FinetuneJobStatus, status: FinetuneJobStatus, now: float
) -> Iterator[dict[str, Any]]:
    """The ``v1.Event``s for each node that is left out from now on, and each new straggler."""
    known = {(each.node, each.since) for each in previous.unfit_nodes}
    for each in status.unfit_nodes:
        if (each.node, each.since) not in known:
            message = f"node {each.node} is left out: {each.reason}"
            yield event_manifest(involved, "UnfitNode", message, now, (each.node, each.since), warning=True)
    slow = {(each.rank, each.since) for each in previous.stragglers}
    for found in status.stragglers:
        if (found.rank, found.since) not in slow:
            message = (
                f"rank {found.rank} on node {found.node} takes {found.ratio:.2f} times as long as the median rank "
                f"since {found.since}"
            )
            about = (str(found.rank), found.since)
            yield event_manifest(involved, "Straggler", message, now, about, warning=True)


def condition_events(
    involved: Involved, before: Sequence[Condition], after: Sequence[Condition], now: float
) -> Iterator[dict[str, Any]]:
    """The ``v1.Event``s for the difference of two lists of conditions.

    A warning that refers to another condition gets the message of that one in place of the reference. Of two
    conditions with the same message, the first gets an Event.

    Args:
        involved: The object with these conditions.
        before: Its conditions before.
        after: Its conditions now.
        now: Unix time.
    """
    messages: set[str] = set()
    for condition in after:
        earlier = find(before, condition.type)
        warning = Finding(condition.type, condition.status, condition.reason).is_warning
        message = condition.message or f"{condition.type} is {condition.status}"
        source = find(after, referenced(message)) if warning else None
        message = with_cause(message, source.message if source is not None else None)
        if _is_notable(earlier, condition) and message not in messages:
            messages.add(message)
            since = earlier.last_transition_time if earlier is not None else ""
            about = (condition.type, since, message) if condition.type == _ROLLED_OUT else (condition.type, since)
            yield event_manifest(involved, condition.reason, message, now, about, warning=warning)


def _is_notable(before: Condition | None, now: Condition) -> bool:
    """Whether a condition became true, or is no longer true; a suspension is notable as soon as it begins.

    A rollout that ends is no transition of its condition if the last one was rolled back, too: its reason tells.
    """
    if now.type == _ROLLED_OUT:
        is_same = before is not None and before.reason == now.reason
        return not is_same or (before is not None and now.reason == "RolledBack" and before.message != now.message)
    if now.type in _ROUTINE or (before is not None and before.status == now.status):
        return False
    was = before is not None and before.status == "True"
    return was or now.status == "True" or (now.type == "Suspended" and now.status == "Unknown")


def event_manifest(
    involved: Involved, reason: str, message: str, now: float, about: tuple[str, ...], *, warning: bool
) -> dict[str, Any]:
    """A ``v1.Event``.

    Args:
        involved: The object that it is about.
        reason: One word in CamelCase.
        message: A sentence for people.
        now: Unix time.
        about: What happened, for its name: the same event has the same name.
        warning: Whether a person may have to act.
    """
    time = rfc3339(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{involved.name}.{digest([involved.uid, reason, *about])}",
            "namespace": involved.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": involved.kind,
            "name": involved.name,
            "namespace": involved.namespace,
            "uid": involved.uid,
        },
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:_MAX_MESSAGE_LENGTH],
        "source": {"component": "spotune"},
        "reportingComponent": "spotune",
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
