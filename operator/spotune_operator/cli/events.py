"""What Kubernetes said of a job and of all that belongs to it, in the order of time, each thing once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spotune.formatting import duration
from spotune.job import KIND
from spotune_operator.children.raycluster import ON_DEMAND_GROUP, WORKER_GROUP
from spotune_operator.cli.cluster.jobs import Job
from spotune_operator.kube.timestamps import rfc3339, unix_time

_LONGEST_PREFIX = 50
"""Characters that KubeRay leaves of cluster and group in the name of a worker (``PodName`` of its controller)."""


@dataclass(frozen=True)
class Happening:
    """One thing that was said of an object, however often.

    Attributes:
        first: Unix time at which it was said first.
        last: Unix time at which it was said last.
        count: How often.
        type: Normal or Warning.
        object: Kind and name of what it was said of.
        reason: One word for programs.
        message: A sentence for people.
    """

    first: float
    last: float
    count: int
    type: str
    object: str
    reason: str
    message: str

    def as_json(self) -> dict[str, Any]:
        """The happening with camelCase keys for ``--output json``; times are RFC 3339."""
        times = {"firstTime": rfc3339(self.first), "lastTime": rfc3339(self.last)}
        words = {"type": self.type, "object": self.object, "reason": self.reason, "message": self.message}
        return {**times, "count": self.count, **words}


def happenings(events: Iterable[Mapping[str, Any]], job: Job, pods: Iterable[str]) -> list[Happening]:
    """The events of a job, of its children and of their pods, the latest last.

    Args:
        events: All ``v1.Event``s of the namespace.
        job: As the API server has it.
        pods: Names of its pods; those that are gone are known by how KubeRay names them.
    """
    created = unix_time(job["metadata"].get("creationTimestamp")) or 0.0
    belongs = _membership(job, frozenset(pods))
    found: dict[tuple[str, str, str], Happening] = {}
    for event in events:
        happening = _read(event)
        # What was said of an earlier job of the same name is not about this one.
        if happening.last >= created and belongs(event["involvedObject"]):
            key = (happening.object, happening.reason, happening.message)
            found[key] = _together(found[key], happening) if key in found else happening
    return sorted(found.values(), key=lambda happening: (happening.last, happening.first))


def table(found: Iterable[Happening]) -> RenderableType:
    """A line for each happening, with the day where it is another one than before."""
    grid = Table.grid(padding=(0, 2))
    for name in ("time", "type", "object", "what"):
        grid.add_column(name, no_wrap=name != "what", overflow="fold")
    day = ""
    for happening in found:
        moment = datetime.fromtimestamp(happening.last).astimezone()
        if day != (day := moment.strftime("%A, %-d %B %Y")):
            grid.add_row(Text(day, "bold"))
        style = "yellow" if happening.type == "Warning" else ""
        what = Text(f"{happening.reason}: {_message(happening)}", style)
        grid.add_row(moment.strftime("%H:%M:%S"), Text(happening.type, style), happening.object, what)
    return grid


def _message(happening: Happening) -> str:
    text = " ".join(happening.message.split())
    if happening.count == 1:
        return text
    return f"{text} ({happening.count} times in {duration(happening.last - happening.first)})"


def _membership(job: Job, pods: frozenset[str]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether an ``involvedObject`` is the job, one of its children, or a pod of theirs."""
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    child = f"spotune-{name}"
    groups = [f"{child}-{group}"[:_LONGEST_PREFIX] for group in (WORKER_GROUP, ON_DEMAND_GROUP)]
    prefixes = [f"{child}-head", *(f"{group}-worker" for group in groups)]
    pod = re.compile(f"({'|'.join(map(re.escape, prefixes))})-[a-z0-9]{{5}}")

    def belongs(involved: Mapping[str, Any]) -> bool:
        if involved.get("kind") == KIND:
            return bool(involved.get("uid") == uid)
        its_name = involved.get("name") or ""
        return (
            its_name == child or its_name in pods or (involved.get("kind") == "Pod" and bool(pod.fullmatch(its_name)))
        )

    return belongs


def _read(event: Mapping[str, Any]) -> Happening:
    """A ``v1.Event`` of either generation of reporters: those with first, last and count, and those with a series."""
    series = event.get("series") or {}
    times = [event.get("firstTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp")]
    first = next((time for text in times if (time := unix_time(text)) is not None), 0.0)
    last = unix_time(series.get("lastObservedTime")) or unix_time(event.get("lastTimestamp")) or first
    involved = event["involvedObject"]
    return Happening(
        first=first,
        last=last,
        count=series.get("count") or event.get("count") or 1,
        type=event.get("type") or "Normal",
        object=f"{involved.get('kind')} {involved.get('name')}",
        reason=event.get("reason") or "",
        message=event.get("message") or "",
    )


def _together(one: Happening, other: Happening) -> Happening:
    first, last = min(one.first, other.first), max(one.last, other.last)
    return replace(one, first=first, last=last, count=one.count + other.count)


def lines(found: Iterable[Happening]) -> Iterator[str]:
    """One line of plain text for each happening."""
    for happening in found:
        moment = datetime.fromtimestamp(happening.last).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        yield f"{moment}  {happening.type}  {happening.object}  {happening.reason}: {_message(happening)}"
