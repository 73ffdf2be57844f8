"""A job's log lines, each exactly once, from the supervisor or, without one, from the volume.

The logs are files on the volume. Each new request to a supervisor returns them from the beginning. Every line starts
with the name of its log, and each log only grows. So counting the lines read per log is enough to find the new ones.
"""

from __future__ import annotations

import http.client
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode

from spotune.custom_resource.object_names import PROGRESS_PORT, SUPERVISOR_CONTAINER
from spotune.errors import KubernetesError, RefusedError
from spotune_client.cluster.client import Cluster, Manifest
from spotune_client.cluster.container_log import whole_log
from spotune_client.cluster.jobs import Job, get_job, is_true, outcome, pods_of
from spotune_client.cluster.pod_stream import PodHttpConnection
from spotune_client.cluster.volume_pod import (
    HeadTemplate,
    Notify,
    PodFailedError,
    job_directory,
    pinned_template,
    raise_if_failed,
    running_pod,
    volume_pod_manifest,
)

_READER_SECONDS: Final = 3600
_POLL_SECONDS: Final = 2.0
_CHUNK_BYTES: Final = 2**16


class NewLines:
    """Filters out lines that were already read, when all lines are returned again from the beginning."""

    def __init__(self) -> None:
        self._read: Counter[str] = Counter()
        self._position: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Number of lines read so far."""
        return self._read.total()

    def filter(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines not read before, given all lines from the beginning."""
        self._position.clear()
        for line in lines:
            source = line.partition(": ")[0]
            self._position[source] += 1
            if self._position[source] > self._read[source]:
                self._read[source] += 1
                yield line


def log_lines(
    cluster: Cluster, name: str, count: int | None, notify: Notify, head_template: HeadTemplate = pinned_template
) -> Iterator[str]:
    """The existing log lines, oldest first.

    Args:
        cluster: The cluster with the job.
        name: Name of the job.
        count: Number of last lines to return; None: all.
        notify: Prints a progress message.
        head_template: Finds the template of the head, for the pod that reads the volume.

    Raises:
        UsageError: The job does not exist.
        KubernetesError: The logs cannot be read.
    """
    job, new_lines = get_job(cluster, name), NewLines()
    head = serving_head(pods_of(cluster, name, "head"))
    while head is not None:
        before = new_lines.count
        try:
            yield from new_lines.filter(_supervisor_lines(cluster, head, {"lines": count} if count is not None else {}))
            return
        except RefusedError:
            raise
        except KubernetesError as error:
            if count is not None and new_lines.count:  # the last lines may have changed, so continuing is not possible
                raise
            if new_lines.count == before:
                notify(f"{error}; reading the volume with a temporary pod instead")
                break
    yield from new_lines.filter(_volume_lines(cluster, job, count, notify, head_template))


def followed_lines(
    cluster: Cluster,
    name: str,
    count: int | None,
    notify: Notify,
    head_template: HeadTemplate = pinned_template,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """The existing and all new log lines, until the job has ended; arguments as for ``log_lines``.

    ``pause`` sleeps for the given seconds, and may raise to end.

    Every line is returned exactly once, even if connections break or heads are replaced, as long as the volume exists.
    Lines of one log keep their order; lines of several logs come in order of arrival.

    Raises:
        UsageError: The job does not exist, or was deleted in the meantime.
        KubernetesError: The user may not read the logs, or the pod that reads the volume of an ended job fails.
    """
    new_lines = NewLines()
    if count is not None:
        yield from deque(new_lines.filter(log_lines(cluster, name, None, notify, head_template)), maxlen=count)
    last_problem, volume_read, ended = "", False, False
    while True:
        problem = ""
        try:
            job = get_job(cluster, name)
            ended = outcome(job) is not None
            head = serving_head(pods_of(cluster, name, "head"))
            if head is not None:
                volume_read = False
                yield from new_lines.filter(_follow_supervisor(cluster, name, head, pause))
            elif (ended or is_true(job, "Suspended")) and not volume_read:
                yield from new_lines.filter(_volume_lines(cluster, job, None, notify, head_template))
                volume_read = True
            if ended:
                return
            problem = "" if head is not None else "there is no head pod at the moment; waiting for the next one"
        except KubernetesError as error:
            pod_failed = isinstance(error, PodFailedError)
            if isinstance(error, RefusedError) or (pod_failed and ended):
                raise
            volume_read = volume_read or pod_failed
            problem = f"{error}; {'waiting until the job goes on' if pod_failed else 'retrying'}"
        if problem and problem != last_problem:
            notify(problem)
        last_problem = problem
        pause(_POLL_SECONDS)


def serving_head(pods: Iterable[Manifest]) -> Manifest | None:
    """The head pod that is not being deleted and whose supervisor runs; None if there is none."""
    for pod in pods:
        if not pod["metadata"].get("deletionTimestamp") and _supervisor_runs(pod):
            return pod
    return None


def _supervisor_runs(pod: Manifest) -> bool:
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(
        container["name"] == SUPERVISOR_CONTAINER and "running" in (container.get("state") or {})
        for container in containers
    )


class _StreamEnded(Exception):  # noqa: N818 - not an error
    """Nothing more will arrive on this connection."""


def _follow_supervisor(cluster: Cluster, name: str, head: Manifest, pause: Callable[[float], None]) -> Iterator[str]:
    """Lines from the supervisor of a head pod, until the pod is gone or the job has ended.

    Raises:
        KubernetesError: The supervisor or the API server does not answer.
    """

    def check_head() -> None:
        """Stop if the head's node has crashed or the job has ended; the connection is silent in both cases."""
        pause(0)
        now = serving_head(pods_of(cluster, name, "head"))
        if now is None or now["metadata"]["uid"] != head["metadata"]["uid"] or outcome(get_job(cluster, name)):
            raise _StreamEnded

    try:
        yield from _supervisor_lines(cluster, head, {"follow": 1}, check_head)
    except _StreamEnded:
        return


def _supervisor_lines(
    cluster: Cluster, head: Manifest, parameters: dict[str, int], idle: Callable[[], None] | None = None
) -> Iterator[str]:
    """Lines from the supervisor of a head pod. With ``idle``, a broken connection just ends the iteration.

    Raises:
        KubernetesError: The supervisor does not answer, or the response is incomplete.
    """
    pod = head["metadata"]["name"]
    connection = cluster.connect(pod, PROGRESS_PORT)
    if idle is not None:
        connection.call_when_idle(idle)
    try:
        with PodHttpConnection(connection) as server:
            server.request("GET", f"/logs?{urlencode(parameters)}")
            with server.getresponse() as response:
                if response.status != HTTPStatus.OK:
                    reason = " ".join(response.read().decode(errors="replace").split())
                    raise KubernetesError(f"the supervisor in pod {pod} returned no logs ({response.status}: {reason})")
                remainder = b""
                while chunk := response.read1(_CHUNK_BYTES):
                    *whole, remainder = (remainder + chunk).split(b"\n")
                    yield from (line.decode(errors="replace") for line in whole)
    except (http.client.HTTPException, OSError) as error:
        if idle is None:
            raise KubernetesError(f"the connection to {pod} broke ({str(error) or type(error).__name__})") from error


def _volume_lines(
    cluster: Cluster, job: Job, count: int | None, notify: Notify, head_template: HeadTemplate
) -> Iterator[str]:
    """Lines that a temporary pod reads from the volume.

    Raises:
        KubernetesError: The pod cannot be created, does not start, or fails.
    """
    command = ["python", "-m", "spotune_trainer.observability.logs.run_logs", job_directory(job, head_template)]
    if count is not None:
        command += ["--lines", str(count)]
    last = ""
    manifest = volume_pod_manifest(job, "logs", command, _READER_SECONDS, head_template)
    with running_pod(cluster, manifest, notify) as pod:
        for last in whole_log(cluster, pod):
            yield last
        raise_if_failed(cluster, pod, last)
