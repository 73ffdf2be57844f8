"""`spotune tensorboard`: TensorBoard in a pod on the job's volume, shown in the browser of this machine.

A pod of its own, and not the head: curves are looked at after the end, too, and a look at them takes memory that the
supervisor needs.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from spotune.errors import UsageError
from spotune_operator.cli.cluster.client import Cluster
from spotune_operator.cli.cluster.jobs import get_job
from spotune_operator.cli.cluster.pod_stream import HttpOverPod
from spotune_operator.cli.cluster.port_forward import forwarded
from spotune_operator.cli.cluster.volume_pod import Say, container_state, job_directory, reader_pod, started
from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError

PORT: Final = 6006
HOURS: Final = 12
_SECONDS_TO_ANSWER: Final = 120.0
_POLL_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 5.0


@contextmanager
def tensorboard(cluster: Cluster, name: str, port: int, say: Say) -> Iterator[tuple[str, Callable[[], None]]]:
    """TensorBoard for as long as the block lasts.

    Args:
        cluster: Where the job is.
        name: Of the job.
        port: Of this machine; 0 for any free one.
        say: Tells a person what is waited for.

    Returns:
        Its URL, and a function that waits until TensorBoard has ended.

    Raises:
        UsageError: There is no such job, it writes no such files, or the port is taken.
        KubernetesError: The pod may not be made, or does not start.
    """
    job = get_job(cluster, name)
    if not (job["spec"].get("tracking") or {}).get("tensorboard", True):
        raise UsageError(f"{name} writes nothing for TensorBoard: spec.tracking.tensorboard is false")
    # On the loopback interface of the pod: who may not forward ports to it does not see it.
    options = ["--logdir", f"{job_directory(job)}/logs/tensorboard", "--host", "127.0.0.1", "--port", str(PORT)]
    manifest = reader_pod(job, "tensorboard", ["python", "-m", "tensorboard.main", *options], HOURS * 3600)
    with started(cluster, manifest, say) as pod:
        say(f"waiting for TensorBoard in pod {pod}")
        _wait_until_it_answers(cluster, pod)
        with forwarded(cluster, pod, PORT, port, say) as local_port:
            yield f"http://127.0.0.1:{local_port}/", lambda: _wait_until_it_ends(cluster, pod)


def _wait_until_it_answers(cluster: Cluster, pod: str) -> None:
    end = time.monotonic() + _SECONDS_TO_ANSWER
    while True:
        try:
            with HttpOverPod(cluster.connect(pod, PORT)) as server:
                server.request("GET", "/")
                server.getresponse()
                return
        except RefusedError:
            raise
        except (KubernetesError, http.client.HTTPException, OSError) as error:
            _refuse_ended(cluster, pod)
            if time.monotonic() > end:
                raise KubernetesError(f"TensorBoard in pod {pod} does not answer: {error}") from error
        time.sleep(_POLL_SECONDS)


def _wait_until_it_ends(cluster: Cluster, pod: str) -> None:
    while True:
        time.sleep(_LOOK_SECONDS)
        try:
            ended = _has_ended(cluster, pod)
        except (NotFoundError, RefusedError):
            raise
        except KubernetesError:  # the API server will answer again
            continue
        if ended:
            _refuse_ended(cluster, pod)


def _has_ended(cluster: Cluster, pod: str) -> Mapping[str, Any]:
    """How the pod's container ended; empty while it has not."""
    found: Mapping[str, Any] = container_state(cluster.get(cluster.path("pods", pod))).get("terminated") or {}
    return found


def _refuse_ended(cluster: Cluster, pod: str) -> None:
    """Raise if the pod's container has ended, with its last words.

    Raises:
        KubernetesError: It has.
    """
    ended = _has_ended(cluster, pod)
    if ended:
        words = list(cluster.lines(f"{cluster.path('pods', pod)}/log", tailLines="3"))
        why = f"{ended.get('reason') or 'Ended'}: {' '.join(words)}".rstrip(": ")
        raise KubernetesError(f"TensorBoard in pod {pod} has ended ({why})")
