"""`spotune tensorboard`: runs TensorBoard in a temporary pod on the job's volume and forwards its port.

It does not run in the head pod, because curves are also needed after the job has ended, and because TensorBoard would
use memory that the supervisor needs.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from spotune.errors import UsageError
from spotune_client.cluster.client import Cluster
from spotune_client.cluster.jobs import get_job
from spotune_client.cluster.pod_stream import PodHttpConnection
from spotune_client.cluster.port_forward import port_forward
from spotune_client.cluster.volume_pod import (
    Notify,
    container_state,
    job_directory,
    running_pod,
    volume_pod_manifest,
)
from spotune_operator.cli.head_template import head_template
from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError

PORT: Final = 6006
HOURS: Final = 12
_SECONDS_TO_ANSWER: Final = 120.0
_POLL_SECONDS: Final = 1.0
_LIVENESS_SECONDS: Final = 5.0


@contextmanager
def tensorboard(cluster: Cluster, name: str, port: int, notify: Notify) -> Iterator[tuple[str, Callable[[], None]]]:
    """Run TensorBoard for the duration of the block.

    Args:
        cluster: The cluster with the job.
        name: Name of the job.
        port: Local port; 0: any free port.
        notify: Prints a progress message.

    Returns:
        Its local URL, and a function that blocks until TensorBoard has ended.

    Raises:
        UsageError: The job does not exist, does not write TensorBoard files, or the port is in use.
        KubernetesError: The pod cannot be created or does not start.
    """
    job = get_job(cluster, name)
    if not (job["spec"].get("tracking") or {}).get("tensorboard", True):
        raise UsageError(f"{name} does not write TensorBoard files: spec.tracking.tensorboard is false")
    # Listen on the pod's loopback interface only, so access requires permission to forward ports.
    options = [
        "--logdir",
        f"{job_directory(job, head_template)}/logs/tensorboard",
        "--host",
        "127.0.0.1",
        "--port",
        str(PORT),
    ]
    command = ["python", "-m", "tensorboard.main", *options]
    manifest = volume_pod_manifest(job, "tensorboard", command, HOURS * 3600, head_template)
    with running_pod(cluster, manifest, notify) as pod:
        notify(f"waiting for TensorBoard in pod {pod}")
        _wait_until_ready(cluster, pod)
        with port_forward(cluster, pod, PORT, port, notify) as local_port:
            yield f"http://127.0.0.1:{local_port}/", lambda: _wait_until_terminated(cluster, pod)


def _wait_until_ready(cluster: Cluster, pod: str) -> None:
    deadline = time.monotonic() + _SECONDS_TO_ANSWER
    while True:
        try:
            with PodHttpConnection(cluster.connect(pod, PORT)) as server:
                server.request("GET", "/")
                server.getresponse()
                return
        except RefusedError:
            raise
        except (KubernetesError, http.client.HTTPException, OSError) as error:
            _raise_if_terminated(cluster, pod)
            if time.monotonic() > deadline:
                raise KubernetesError(f"TensorBoard in pod {pod} does not respond: {error}") from error
        time.sleep(_POLL_SECONDS)


def _wait_until_terminated(cluster: Cluster, pod: str) -> None:
    while True:
        time.sleep(_LIVENESS_SECONDS)
        try:
            ended = _termination(cluster, pod)
        except (NotFoundError, RefusedError):
            raise
        except KubernetesError:  # temporary: poll again
            continue
        if ended:
            _raise_if_terminated(cluster, pod)


def _termination(cluster: Cluster, pod: str) -> Mapping[str, Any]:
    """The ``terminated`` state of the pod's container; empty while it runs."""
    found: Mapping[str, Any] = container_state(cluster.get(cluster.path("pods", pod))).get("terminated") or {}
    return found


def _raise_if_terminated(cluster: Cluster, pod: str) -> None:
    """Raise if the pod's container has terminated.

    Raises:
        KubernetesError: It has; the message contains its last log lines.
    """
    ended = _termination(cluster, pod)
    if ended:
        last_lines = list(cluster.lines(f"{cluster.path('pods', pod)}/log", tailLines="3"))
        cause = f"{ended.get('reason') or 'Ended'}: {' '.join(last_lines)}".rstrip(": ")
        raise KubernetesError(f"TensorBoard in pod {pod} has ended ({cause})")
