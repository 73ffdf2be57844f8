"""`spotune status` of ModelServices: a table of all services, or one service in detail with its pods and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotune.crd.definition import MODEL_SERVICES
from spotune_client.cluster.client import Cluster
from spotune_client.cluster.jobs import Job, conditions_of, is_true, phase, reason_and_message, status_of, with_cause
from spotune_client.cluster.resources import get_visible
from spotune_client.cluster.services import COMPONENTS, PodRow, Service, pod_row, service_pods
from spotune_operator.cli.events import EventSummary, summarize_service_events
from spotune_operator.cli.events import table as event_table
from spotune_operator.cli.status import age, details_grid, listing_grid, table
from spotune_operator.errors import RefusedError
from spotune_operator.kube.conditions import referenced

_STYLES: Final = {"Serving": "green", "Stalled": "red", "Suspended": "dim", "Upgrading": "cyan"}
_EVENTS_SHOWN: Final = 5
_COLUMNS: Final = ("name", "phase", "replicas", "model", "requests/s", "age", "URL")


def listing(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Name, namespace and status of jobs or services, for ``--output json``."""
    return [
        {**{key: item["metadata"][key] for key in ("name", "namespace")}, "status": status_of(item)} for item in found
    ]


def tables(
    jobs: Sequence[Job], services: Sequence[Service], now: float, *, with_namespace: bool, with_bar: bool
) -> RenderableType:
    """The tables of jobs and of services, without an empty one; arguments as for ``table`` and ``service_table``."""
    of_jobs = [table(jobs, now, with_namespace=with_namespace, with_bar=with_bar)] if jobs else []
    of_services = [service_table(services, now, with_namespace=with_namespace)] if services else []
    return Group(*of_jobs, *([Text("")] if jobs and services else []), *of_services)


def service_table(services: Sequence[Service], now: float, *, with_namespace: bool) -> RenderableType:
    """A table with one row per service, followed by one line per service that needs attention.

    Args:
        services: The services as the API server returns them.
        now: Unix time in seconds.
        with_namespace: Whether to show a namespace column.
    """
    rows = [_cells(service, now) for service in services]
    return Group(listing_grid(services, _COLUMNS, rows, with_namespace=with_namespace), *_problem_lines(services))


def _cells(service: Service, now: float) -> list[RenderableType]:
    status = status_of(service)
    rate = status.get("requestsPerSecond")
    return [
        service["metadata"]["name"],
        Text(phase(service), _STYLES.get(phase(service), "")),
        status.get("replicas") or "-",
        _version(status.get("model")) or "-",
        f"{rate:,.1f}" if rate is not None else "-",
        age(service, now),
        status.get("url") or "-",
    ]


def _problem_lines(services: Sequence[Service]) -> Iterator[Text]:
    for service in services:
        for found in (each for each in conditions_of(service) if each["type"] == "Stalled"):
            if found["status"] == "True":
                text = reason_and_message(with_cause(service, found))
                yield Text(f"{service['metadata']['name']}: Stalled: {text}", "yellow")


def panel_from_cluster(cluster: Cluster, service: Service, now: float) -> RenderableType:
    """All details of one service, with pods and events if the user may list them."""
    name = service["metadata"]["name"]
    try:
        pods = service_pods(cluster, name)
        events = summarize_service_events(cluster.items(cluster.path("events")), service, pods)
    except RefusedError as error:
        return Group(service_panel(service, (), (), now), Text(f"\npods and events: {error}", "yellow"))
    return service_panel(service, pods, events, now)


def hint_at_service(cluster: Cluster, name: str) -> str:
    """A sentence about the service that has the name of a job; empty without one."""
    service = get_visible(cluster, MODEL_SERVICES, name)
    if service is None:
        return ""
    return f"The ModelService of this name has phase {phase(service)}: spotune status ms/{name}"


def service_panel(
    service: Service, pods: Sequence[Mapping[str, Any]], events: Sequence[EventSummary], now: float
) -> RenderableType:
    """All details of one service.

    Args:
        service: The service as the API server returns it.
        pods: Its pods as the API server returns them.
        events: Its events; the newest ones are shown.
        now: Unix time in seconds.
    """
    conditions = notable_service_conditions(service)
    parts: list[RenderableType] = [details_grid(service, _STYLES, _rows(service, now), conditions, now)]
    if pods:
        parts += [Text(""), _pod_table([pod_row(pod) for pod in pods])]
    if events:
        parts += [Text(""), Text("latest events", "dim"), event_table(events[-_EVENTS_SHOWN:])]
    return Group(*parts)


def _rows(service: Service, now: float) -> Iterator[tuple[str, str]]:
    """Label and content of each row; content is empty if unknown."""
    status = status_of(service)
    yield "model", _model(status.get("model"))
    yield "next model", _model(status.get("pendingModel"))
    yield "rollout", _rollout(status.get("rollout"))
    for name, version in sorted((status.get("adapters") or {}).items()):
        yield f"adapter {name}", _model(version)
    yield "replicas", _replicas(service)
    yield "load", _load(status)
    yield "URL", status.get("url") or ""
    yield "age", age(service, now)


def _model(found: Mapping[str, Any] | None) -> str:
    """Version and location of a model; empty without one."""
    location = (found or {}).get("location") or ""
    return f"{_version(found)} from {location}" if _version(found) and location else _version(found) or location


def _version(found: Mapping[str, Any] | None) -> str:
    version: str = (found or {}).get("version") or ""
    return version


def _rollout(found: Mapping[str, Any] | None) -> str:
    """Which part of the requests the next version gets; empty without a rollout."""
    if not found or found.get("weight") is None:
        return ""
    return f"{found['weight']} % of the requests go to {found.get('version') or 'the next model'}"


def _replicas(service: Service) -> str:
    """Ready and desired replicas, with the limits of autoscaling; empty if unknown."""
    ready = status_of(service).get("replicas")
    given = (service.get("spec") or {}).get("replicas") or {}
    low, high = given.get("min", 1), given.get("max", 1)
    limits = f" (autoscaling from {low} to {high})" if low < high else ""
    return f"{ready} ready{limits}" if ready else ""


def _load(status: Mapping[str, Any]) -> str:
    rate, first = status.get("requestsPerSecond"), status.get("firstTokenMillisecondsP50")
    parts = [
        f"{rate:,.1f} requests/s" if rate is not None else "",
        f"first token after {first:,.0f} ms (median)" if first is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def notable_service_conditions(service: Service) -> list[Mapping[str, Any]]:
    """The conditions worth showing: problems and unfinished work.

    A service that does what its spec says has none. Equal messages are shown once, the cause before ``Stalled``.
    """
    is_suspended = is_true(service, "Suspended")
    shown: dict[str, Mapping[str, Any]] = {}
    for found in sorted(conditions_of(service), key=lambda found: found["type"] in ("Stalled", "Ready", "Reconciling")):
        if _is_notable(found, is_suspended=is_suspended):
            shown.setdefault(found.get("message") or found["type"], found)
    return list(shown.values())


def _is_notable(found: Mapping[str, Any], *, is_suspended: bool) -> bool:
    name, status = found["type"], found["status"]
    if name == "Suspended":
        return bool(status != "False")
    if name in ("Stalled", "Reconciling"):
        return bool(status == "True")
    refers = name == "Ready" and bool(referenced(found.get("message") or ""))
    return bool(status != "True") and not is_suspended and not refers


def _pod_table(rows: Sequence[PodRow]) -> RenderableType:
    """A table of pods; with two Ray clusters, it says which pods are of the newer one."""
    newest = max(rows, key=lambda row: (_cluster_created(row, rows), row.cluster)).cluster
    is_replaced = any(row.cluster != newest for row in rows)
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("component", *(["cluster"] if is_replaced else []), "pod", "node", "state"):
        grid.add_column(column.upper(), no_wrap=column in ("component", "pod"), overflow="fold")
    for row in sorted(rows, key=lambda row: (_rank(row.component), row.name)):
        node = f"{row.node or '-'}{f' ({row.capacity})' if row.capacity else ''}"
        restarts = f", {row.restarts} restart{'s' if row.restarts > 1 else ''}" if row.restarts else ""
        state = Text(row.state + restarts, "yellow" if row.is_problem else "")
        age_of_cluster = ["new" if row.cluster == newest else "old"] if is_replaced else []
        grid.add_row(row.component, *age_of_cluster, row.name, node, state)
    return grid


def _cluster_created(row: PodRow, rows: Sequence[PodRow]) -> str:
    """When the oldest pod of a pod's Ray cluster was created."""
    return min(each.created for each in rows if each.cluster == row.cluster)


def _rank(component: str) -> int:
    return COMPONENTS.index(component) if component in COMPONENTS else len(COMPONENTS)
