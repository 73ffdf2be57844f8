"""The lines of a job's logs: from the supervisor while there is one, else from the volume; each of them once.

The logs lie on the volume. A supervisor that is asked anew, or another one after the loss of the head, tells them from
the beginning. Every line begins with the name of whose it is, and each such log only grows: so the number of lines read
of each tells what is new.
"""

from __future__ import annotations

import http.client
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode

from spotune_operator.children.pods import SUPERVISOR_CONTAINER
from spotune_operator.children.ports import PROGRESS
from spotune_operator.cli.cluster.client import Cluster, Manifest
from spotune_operator.cli.cluster.jobs import Job, get_job, holds, outcome, pods_of
from spotune_operator.cli.cluster.pod_stream import HttpOverPod
from spotune_operator.cli.cluster.volume_pod import Say, job_directory, reader_pod, refuse_failure, started
from spotune_operator.errors import KubernetesError, RefusedError

_READER_SECONDS: Final = 3600
_POLL_SECONDS: Final = 2.0
_CHUNK_BYTES: Final = 2**16


class Unread:
    """Knows which lines are new when all are told again from the beginning."""

    def __init__(self) -> None:
        self._read: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """How many lines were read."""
        return self._read.total()

    def of(self, lines: Iterable[str]) -> Iterator[str]:
        """Of all lines from the beginning, those that were not read before."""
        self._told.clear()
        for line in lines:
            source = line.partition(": ")[0]
            self._told[source] += 1
            if self._told[source] > self._read[source]:
                self._read[source] += 1
                yield line


def log_lines(cluster: Cluster, name: str, count: int | None, say: Say) -> Iterator[str]:
    """The lines that there are, oldest first.

    Args:
        cluster: Where the job is.
        name: Of the job.
        count: Only so many of the last ones; None: all.
        say: Tells a person what is waited for.

    Raises:
        UsageError: There is no such job.
        KubernetesError: They cannot be had.
    """
    job, unread = get_job(cluster, name), Unread()
    head = serving_head(pods_of(cluster, name, "head"))
    while head is not None:
        before = unread.count
        try:
            yield from unread.of(_of_supervisor(cluster, head, {"lines": count} if count is not None else {}))
            return
        except RefusedError:
            raise
        except KubernetesError as error:
            if count is not None and unread.count:  # the last lines may be others by now
                raise
            if unread.count == before:
                say(f"{error}; a pod of its own reads the volume")
                break
    yield from unread.of(_of_volume(cluster, job, count, say))


def followed_lines(
    cluster: Cluster, name: str, count: int | None, say: Say, pause: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """The lines that there are, and those that come, until the job has ended; arguments as for ``log_lines``.

    No line comes twice. None is left out, whatever becomes of connections, supervisors and heads meanwhile, as long as
    the volume is there. Lines of one driver or worker come in their order; of several, in the order of their arrival.

    Raises:
        UsageError: There is no such job, or it is deleted meanwhile.
        KubernetesError: The user may not see the logs.
    """
    unread = Unread()
    if count is not None:
        yield from deque(unread.of(log_lines(cluster, name, None, say)), maxlen=count)
    said, at_rest = "", False
    while True:
        trouble = ""
        try:
            job = get_job(cluster, name)
            ended = outcome(job) is not None
            head = serving_head(pods_of(cluster, name, "head"))
            if head is not None:
                at_rest = False
                yield from unread.of(_growing(cluster, name, head))
            elif (ended or holds(job, "Suspended")) and not at_rest:
                at_rest = True
                yield from unread.of(_of_volume(cluster, job, None, say))
            if ended:
                return
            trouble = "" if head is not None else "there is no head pod now; waiting for the next one"
        except RefusedError:
            raise
        except KubernetesError as error:
            trouble = f"{error}; trying again"
        if trouble and trouble != said:
            say(trouble)
        said = trouble
        pause(_POLL_SECONDS)


def serving_head(pods: Iterable[Manifest]) -> Manifest | None:
    """The head pod that is to stay, if its supervisor runs."""
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


class _Over(Exception):  # noqa: N818 - nothing is wrong
    """There is nothing more to wait for on this connection."""


def _growing(cluster: Cluster, name: str, head: Manifest) -> Iterator[str]:
    """The lines that a head tells for as long as it is there and the job has not ended.

    Raises:
        KubernetesError: The supervisor does not answer, or the API server does not.
    """

    def look() -> None:
        """A silent connection may be that of a node that has crashed, or of a job that has nothing more to say."""
        now = serving_head(pods_of(cluster, name, "head"))
        if now is None or now["metadata"]["uid"] != head["metadata"]["uid"] or outcome(get_job(cluster, name)):
            raise _Over

    try:
        yield from _of_supervisor(cluster, head, {"follow": 1}, look)
    except _Over:
        return


def _of_supervisor(
    cluster: Cluster, head: Manifest, parameters: dict[str, int], idle: Callable[[], None] | None = None
) -> Iterator[str]:
    """The lines that the supervisor of a head pod tells; with ``idle``, a connection that breaks is an end like any.

    Raises:
        KubernetesError: It does not answer, or not to the end.
    """
    pod = head["metadata"]["name"]
    connection = cluster.connect(pod, PROGRESS.number)
    if idle is not None:
        connection.when_idle(idle)
    try:
        with HttpOverPod(connection) as server:
            server.request("GET", f"/logs?{urlencode(parameters)}")
            answer = server.getresponse()
            if answer.status != HTTPStatus.OK:
                said = " ".join(answer.read().decode(errors="replace").split())
                raise KubernetesError(f"the supervisor of {pod} has no logs to tell ({answer.status}: {said})")
            rest = b""
            while chunk := answer.read1(_CHUNK_BYTES):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
    except (http.client.HTTPException, OSError) as error:
        if idle is None:
            raise KubernetesError(f"the connection to {pod} broke ({str(error) or type(error).__name__})") from error


def _of_volume(cluster: Cluster, job: Job, count: int | None, say: Say) -> Iterator[str]:
    """The lines that a pod of our own reads from the volume.

    Raises:
        KubernetesError: The pod may not be made, does not start, or finds nothing.
    """
    command = ["python", "-m", "spotune_trainer.observability.logs.run_logs", job_directory(job)]
    if count is not None:
        command += ["--lines", str(count)]
    last = ""
    with started(cluster, reader_pod(job, "logs", command, _READER_SECONDS), say) as pod:
        for last in cluster.lines(f"{cluster.path('pods', pod)}/log", follow="true"):
            yield last
        refuse_failure(cluster, pod, last)
