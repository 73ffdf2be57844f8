"""`spotune events`: Kubernetes events of a job or service, its children and their pods, with repeated ones merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spotune.crd.definition import FINETUNE_JOBS
from spotune.custom_resource.object_names import CLUSTER_LABEL
from spotune.formatting import duration
from spotune.job import KIND
from spotune.service import SERVICE_KIND
from spotune.units.timestamps import rfc3339, unix_time
from spotune_client.cluster.client import Cluster
from spotune_client.cluster.jobs import Job, pods_of
from spotune_client.cluster.resources import find_object, label_of
from spotune_client.cluster.services import SERVING_GROUPS, Service, service_pods
from spotune_operator.children.raycluster import ON_DEMAND_GROUP, WORKER_GROUP
from spotune_operator.children.serving.resolved_service import child_name

_OWNERS = (KIND, SERVICE_KIND)
_LONGEST_PREFIX = 50
"""KubeRay truncates cluster and group name to this many characters in a pod name (``PodName`` in its controller)."""


@dataclass(frozen=True)
class EventSummary:
    """All events with the same object, reason and message.

    Attributes:
        first: Unix time of the first occurrence.
        last: Unix time of the last occurrence.
        count: Number of occurrences.
        type: Normal or Warning.
        object: Kind and name of the object.
        reason: Machine-readable reason.
        message: Human-readable message.
    """

    first: float
    last: float
    count: int
    type: str
    object: str
    reason: str
    message: str

    def as_json(self) -> dict[str, Any]:
        """The events with camelCase keys for ``--output json``; times are RFC 3339."""
        times = {"firstTime": rfc3339(self.first), "lastTime": rfc3339(self.last)}
        text_fields = {"type": self.type, "object": self.object, "reason": self.reason, "message": self.message}
        return {**times, "count": self.count, **text_fields}


def events_of(cluster: Cluster, name: str) -> list[EventSummary]:
    """The events of a job or service that a user names.

    Raises:
        UsageError: It does not exist.
        KubernetesError: The user may not read it, its pods or the events.
    """
    resource, found = find_object(cluster, name)
    title, events = found["metadata"]["name"], cluster.items(cluster.path("events"))
    if resource is FINETUNE_JOBS:
        return summarize_events(events, found, [pod["metadata"]["name"] for pod in pods_of(cluster, title)])
    return summarize_service_events(events, found, service_pods(cluster, title))


def summarize_events(events: Iterable[Mapping[str, Any]], job: Job, pods: Iterable[str]) -> list[EventSummary]:
    """The events of a job, its children and their pods, sorted by time of the last occurrence.

    Args:
        events: All ``v1.Event``s of the namespace.
        job: The job as the API server returns it.
        pods: Names of its existing pods. Deleted pods are recognised by KubeRay's naming scheme.
    """
    child = f"spotune-{job['metadata']['name']}"
    pools = [pool["name"] for pool in (job["spec"].get("workers") or {}).get("pools") or ()]
    groups = (WORKER_GROUP, ON_DEMAND_GROUP, *pools)
    return _summarize(events, job, _children(child, child, frozenset(pods), groups))


def summarize_service_events(
    events: Iterable[Mapping[str, Any]], service: Service, pods: Iterable[Mapping[str, Any]]
) -> list[EventSummary]:
    """The events of a service, its children and their pods, sorted by time of the last occurrence.

    Args:
        events: All ``v1.Event``s of the namespace.
        service: The service as the API server returns it.
        pods: Its existing pods. Deleted pods are recognised only if another pod of their Ray cluster exists, because
            KubeRay gives clusters random names.
    """
    child, found = child_name(service["metadata"]["name"]), list(pods)
    names = frozenset(pod["metadata"]["name"] for pod in found)
    clusters = {label_of(pod, CLUSTER_LABEL) for pod in found} - {""}
    checks = [_children(child, cluster, names, SERVING_GROUPS) for cluster in (clusters or {child})]
    return _summarize(events, service, lambda involved: any(check(involved) for check in checks))


def _summarize(
    events: Iterable[Mapping[str, Any]], owner: Mapping[str, Any], is_child: Callable[[Mapping[str, Any]], bool]
) -> list[EventSummary]:
    created, uid = unix_time(owner["metadata"].get("creationTimestamp")) or 0.0, owner["metadata"]["uid"]
    summaries: dict[tuple[str, str, str], EventSummary] = {}
    for event in events:
        summary = _from_event(event)
        involved = event["involvedObject"]
        belongs = involved.get("uid") == uid if involved.get("kind") in _OWNERS else is_child(involved)
        # Skip events of an earlier object with the same name.
        if summary.last >= created and belongs:
            key = (summary.object, summary.reason, summary.message)
            summaries[key] = _merge(summaries[key], summary) if key in summaries else summary
    return sorted(summaries.values(), key=lambda summary: (summary.last, summary.first))


def table(summaries: Iterable[EventSummary]) -> RenderableType:
    """A table with one row per summary, and a row with the date whenever the day changes."""
    grid = Table.grid(padding=(0, 2))
    for name in ("time", "type", "object", "what"):
        grid.add_column(name, no_wrap=name != "what", overflow="fold")
    day = ""
    for summary in summaries:
        moment = datetime.fromtimestamp(summary.last).astimezone()
        if day != (day := moment.strftime("%A, %-d %B %Y")):
            grid.add_row(Text(day, "bold"))
        style = "yellow" if summary.type == "Warning" else ""
        what = Text(f"{summary.reason}: {_message(summary)}", style)
        grid.add_row(moment.strftime("%H:%M:%S"), Text(summary.type, style), summary.object, what)
    return grid


def _message(summary: EventSummary) -> str:
    text = " ".join(summary.message.split())
    if summary.count == 1:
        return text
    return f"{text} ({summary.count} times in {duration(summary.last - summary.first)})"


def _children(
    child: str, cluster: str, pods: frozenset[str], groups: Iterable[str]
) -> Callable[[Mapping[str, Any]], bool]:
    """Return a predicate: whether an ``involvedObject`` is a child or a pod of a job or service.

    Args:
        child: Name of its children.
        cluster: Name of its RayCluster.
        pods: Names of its existing pods.
        groups: Names of its worker groups.
    """
    prefixes = [f"{cluster}-head", *(f"{f'{cluster}-{group}'[:_LONGEST_PREFIX]}-worker" for group in groups)]
    pod = re.compile(f"({'|'.join(map(re.escape, prefixes))})-[a-z0-9]{{5}}")

    def belongs(involved: Mapping[str, Any]) -> bool:
        name = involved.get("name") or ""
        return name in (child, cluster, *pods) or (involved.get("kind") == "Pod" and bool(pod.fullmatch(name)))

    return belongs


def _from_event(event: Mapping[str, Any]) -> EventSummary:
    """Summarize one ``v1.Event``: of older reporters (first, last, count) or of newer ones (series)."""
    series = event.get("series") or {}
    times = [event.get("firstTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp")]
    first = next((time for text in times if (time := unix_time(text)) is not None), 0.0)
    last = unix_time(series.get("lastObservedTime")) or unix_time(event.get("lastTimestamp")) or first
    involved = event["involvedObject"]
    return EventSummary(
        first=first,
        last=last,
        count=series.get("count") or event.get("count") or 1,
        type=event.get("type") or "Normal",
        object=f"{involved.get('kind')} {involved.get('name')}",
        reason=event.get("reason") or "",
        message=event.get("message") or "",
    )


def _merge(earlier: EventSummary, later: EventSummary) -> EventSummary:
    first, last = min(earlier.first, later.first), max(earlier.last, later.last)
    return replace(earlier, first=first, last=last, count=earlier.count + later.count)


def plain_lines(summaries: Iterable[EventSummary]) -> Iterator[str]:
    """One line of plain text per summary."""
    for summary in summaries:
        moment = datetime.fromtimestamp(summary.last).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        yield f"{moment}  {summary.type}  {summary.object}  {summary.reason}: {_message(summary)}"
