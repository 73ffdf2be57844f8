"""The logs of a ModelService: what its pods print, in order of time, each line with the name of its pod.

The logs are those of `kubectl logs`: they are gone with their pod. A broken connection is resumed at the time of the
last line, without repeating or skipping a line.
"""

from __future__ import annotations

import heapq
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from spotune.crd.definition import MODEL_SERVICES
from spotune.custom_resource.object_names import GATEWAY, HEAD_CONTAINER, REPLICAS, WORKER_CONTAINER
from spotune.errors import KubernetesError, NotFoundError, RefusedError
from spotune_client.cluster.client import Cluster, Manifest
from spotune_client.cluster.container_log import ReadPosition, StampedLine
from spotune_client.cluster.resources import get_object
from spotune_client.cluster.services import component_of, service_pods
from spotune_client.cluster.volume_pod import Notify

_POLL_SECONDS: Final = 2.0
_CONTAINERS: Final = (HEAD_CONTAINER, WORKER_CONTAINER)
_NOT_YET: Final = (400, 404)
"""Statuses of the API server for the log of a container that has not started, or whose pod is gone."""


@dataclass(frozen=True)
class LogSelection:
    """Which log lines of a service to print.

    Attributes:
        service: Name of the service.
        component: ``gateway``, ``replicas`` or ``head``; empty: gateway and replicas.
        lines: Number of last lines; None: all.
        since_seconds: Maximum age of the lines in seconds; None: all.
    """

    service: str
    component: str = ""
    lines: int | None = None
    since_seconds: float | None = None

    def pods(self, cluster: Cluster) -> list[Manifest]:
        """The pods that have a log."""
        components = (self.component,) if self.component else (GATEWAY, REPLICAS)
        found = service_pods(cluster, self.service, self.component)
        return [pod for pod in found if component_of(pod) in components and _has_started(pod)]

    @property
    def parameters(self) -> dict[str, str]:
        """Query parameters of the first request for a log."""
        optional = {
            "tailLines": None if self.lines is None else str(self.lines),
            "sinceSeconds": None if self.since_seconds is None else str(max(1, round(self.since_seconds))),
        }
        return {name: value for name, value in optional.items() if value is not None}


def service_log_lines(cluster: Cluster, selection: LogSelection, notify: Notify) -> Iterator[str]:
    """The existing log lines of all pods, oldest first, each with the name of its pod.

    If a container was restarted, the log of its previous run comes first.

    Raises:
        UsageError: The service does not exist.
        KubernetesError: The user may not read the logs, or the API server does not answer.
    """
    get_object(cluster, MODEL_SERVICES, selection.service)
    pods = selection.pods(cluster)
    if not pods:
        notify(f"no pod of {selection.service} has a log: `spotune status ms/{selection.service}` shows why")
    found = heapq.merge(*(_existing(cluster, pod, selection.parameters) for pod in pods))
    yield from deque((line for _, line in found), maxlen=selection.lines)


def _existing(cluster: Cluster, pod: Manifest, parameters: Mapping[str, str]) -> Iterator[StampedLine]:
    container = _ray_container(pod)
    position, name = ReadPosition(), pod["metadata"]["name"]
    runs = [{"previous": "true"}, {}] if container.get("restartCount") else [{}]
    for run in runs:
        lines = _pod_lines(cluster, pod, {**parameters, **run})
        yield from ((moment, f"{name}: {text}") for moment, text in position.filter(lines))


@dataclass
class _Follower:
    """Reads the log of one pod in a thread of its own, so that a pod without output does not delay the others.

    Attributes:
        position: How far the log was read; kept over broken connections.
        thread: The running thread; None before the first one.
        start: Monotonic time of the first request.
    """

    position: ReadPosition = field(default_factory=ReadPosition)
    thread: threading.Thread | None = None
    start: float = 0.0

    def read(self, run: Callable[[Mapping[str, str], ReadPosition], None], selection: LogSelection) -> None:
        """Start reading, unless the thread still runs."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=run, args=(self._parameters(selection), self.position), daemon=True)
            self.thread.start()

    def _parameters(self, selection: LogSelection) -> Mapping[str, str]:
        """Query parameters of the next request."""
        if self.thread is None:
            self.start = time.monotonic()
        elif selection.lines == 0 and self.position.last is None:  # not tailLines again: it would skip new lines
            return {"sinceSeconds": str(math.ceil(time.monotonic() - self.start))}
        return self.position.parameters or selection.parameters


def followed_service_lines(
    cluster: Cluster,
    selection: LogSelection,
    notify: Notify,
    poll_seconds: float = _POLL_SECONDS,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """The existing and all new log lines, also of pods that start later, without an end.

    Lines of one pod keep their order; lines of several pods come in order of arrival.

    Args:
        cluster: The cluster with the service.
        selection: Which log lines.
        notify: Prints a progress message.
        poll_seconds: Seconds between two looks for new pods and broken connections.
        pause: Called with 0 at each of them; may raise to end.

    Raises:
        UsageError: The service does not exist, or was deleted in the meantime.
        KubernetesError: The user may not read the logs.
    """
    arrived: queue.SimpleQueue[str | RefusedError] = queue.SimpleQueue()
    followers: dict[str, _Follower] = {}
    last_problem = ""
    while True:
        pause(0)
        try:
            get_object(cluster, MODEL_SERVICES, selection.service)
            pods = selection.pods(cluster)
            for pod in pods:
                follower = followers.setdefault(pod["metadata"]["uid"], _Follower())
                follower.read(_reader(cluster, pod, arrived), selection)
            problem = "" if pods else "no pod has a log at the moment; waiting for the next one"
        except RefusedError:
            raise
        except KubernetesError as error:
            problem = f"{error}; retrying"
        if problem and problem != last_problem:
            notify(problem)
        last_problem = problem
        yield from _arriving(arrived, time.monotonic() + poll_seconds)


def _reader(
    cluster: Cluster, pod: Manifest, arrived: queue.SimpleQueue[str | RefusedError]
) -> Callable[[Mapping[str, str], ReadPosition], None]:
    """Return a function that reads the log of a pod from a position on, until its container or the connection ends."""
    name = pod["metadata"]["name"]

    def run(parameters: Mapping[str, str], position: ReadPosition) -> None:
        try:
            for _, text in position.filter(_pod_lines(cluster, pod, {**parameters, "follow": "true"})):
                arrived.put(f"{name}: {text}")
        except RefusedError as error:
            arrived.put(error)
        except KubernetesError:
            return  # the next poll reports it if the API server is down, and connects again otherwise

    return run


def _arriving(arrived: queue.SimpleQueue[str | RefusedError], until: float) -> Iterator[str]:
    """Lines that arrive before a time of the monotonic clock.

    Raises:
        RefusedError: The user may not read a log.
    """
    while (seconds := until - time.monotonic()) > 0:
        try:
            found = arrived.get(timeout=seconds)
        except queue.Empty:
            return
        if isinstance(found, RefusedError):
            raise found
        yield found


def _pod_lines(cluster: Cluster, pod: Manifest, parameters: Mapping[str, str]) -> Iterator[str]:
    """Lines of a pod's Ray container with the kubelet's timestamps; none if it has not started or is gone.

    Raises:
        KubernetesError: The user may not read the log, or the connection broke.
    """
    container, path = _ray_container(pod)["name"], f"{cluster.path('pods', pod['metadata']['name'])}/log"
    lines = cluster.lines(path, container=container, timestamps="true", **parameters)
    try:
        first = next(lines, None)
    except (NotFoundError, RefusedError) as error:
        if error.status in _NOT_YET:
            return
        raise
    yield from chain([first] if first is not None else [], lines)


def _ray_container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the container with Ray; empty before the kubelet reports it."""
    statuses: Iterable[Mapping[str, Any]] = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((each for each in statuses if each["name"] in _CONTAINERS), {})


def _has_started(pod: Mapping[str, Any]) -> bool:
    container = _ray_container(pod)
    state = container.get("state") or {}
    return "running" in state or "terminated" in state or bool(container.get("restartCount"))
