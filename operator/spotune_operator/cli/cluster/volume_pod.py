"""A pod of our own on a job's volume, for what can be read when there is no head: for a short time, and read-only.

It is made like the head pod, so it is let in, placed and given its images as that one is. It has not the label that
makes a pod one of the job's, because the operator counts those.
"""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from spotune.job import API_VERSION, KIND
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune_operator.children.pods import SUPERVISOR_CONTAINER, head_pod
from spotune_operator.children.resolved_job import place
from spotune_operator.cli.cluster.client import Cluster, Manifest
from spotune_operator.cli.cluster.jobs import Job, status_of
from spotune_operator.errors import KubernetesError, NotFoundError
from spotune_operator.observe.pod_problems import explain_pending
from spotune_operator.providers import PROVIDERS, ProviderName

Say = Callable[[str], None]

CONTAINER: Final = "reader"
_VOLUME: Final = "data"
_FROM_THE_HEAD: Final = (
    *("affinity", "imagePullSecrets", "nodeSelector", "runtimeClassName", "schedulerName", "securityContext"),
    "tolerations",
)
_RESOURCES: Final = {
    "requests": {"cpu": "50m", "memory": "128Mi"},
    "limits": {"cpu": "1", "memory": "2Gi"},
}
_SECONDS_TO_START: Final = 600.0
_POLL_SECONDS: Final = 1.0


def job_directory(job: Job) -> str:
    """The job's folder, as its pods see it."""
    command = _supervisor(_head_template(job))["command"]
    return str(command[command.index("--directory") + 1])


def reader_pod(job: Job, purpose: str, command: Sequence[str], seconds: int) -> Manifest:
    """A pod that runs a command with the job's image on the job's volume.

    Args:
        job: As the API server has it.
        purpose: A word for the pod's name.
        command: Whose output or server is wanted.
        seconds: After which the kubelet ends it, should this process be killed before it can.
    """
    metadata, template = job["metadata"], _head_template(job)
    spec, supervisor = template["spec"], _supervisor(template)
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": metadata["name"], "uid": metadata["uid"]}
    mounts = [mount | {"readOnly": True} for mount in supervisor["volumeMounts"] if mount["name"] == _VOLUME]
    container = {
        "name": CONTAINER,
        "image": (status_of(job).get("pinned") or {}).get("image") or supervisor["image"],
        "imagePullPolicy": supervisor.get("imagePullPolicy", "IfNotPresent"),
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in (("HOME", "/tmp"), ("PYTHONUNBUFFERED", "1"))],  # noqa: S108 - the pod's own
        "resources": _RESOURCES,
        "securityContext": supervisor["securityContext"],
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            # Named here and not by the API server, to be found again even if its answer is lost.
            "name": f"spotune-{metadata['name']}-{purpose}-{secrets.token_hex(3)}",
            "namespace": metadata["namespace"],
            "labels": {
                "app.kubernetes.io/name": "spotune",
                "app.kubernetes.io/instance": metadata["name"],
                "app.kubernetes.io/component": CONTAINER,
            },
            "ownerReferences": [owner | {"controller": False, "blockOwnerDeletion": False}],
        },
        "spec": {
            **{name: spec[name] for name in _FROM_THE_HEAD if name in spec},
            "activeDeadlineSeconds": seconds,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [volume for volume in spec["volumes"] if volume["name"] == _VOLUME],
        },
    }


def _head_template(job: Job) -> Mapping[str, Any]:
    """The head's pod template: the one that the job is run with, or before it is run the one that would be.

    Raises:
        JobError: The job was never run, and cannot be.
    """
    pinned = status_of(job).get("pinned")
    if pinned:
        template: Mapping[str, Any] = json.loads(pinned["rayCluster"])["headGroupSpec"]["template"]
        return template
    wanted = parse_job(Document({name: part for name, part in job.items() if name != "status"}))
    named = wanted.spec.cluster.provider
    return head_pod(place(wanted, PROVIDERS[ProviderName.NONE if named == "auto" else ProviderName(named)])).template


def _supervisor(template: Mapping[str, Any]) -> Mapping[str, Any]:
    containers: list[Mapping[str, Any]] = template["spec"]["containers"]
    return next(container for container in containers if container["name"] == SUPERVISOR_CONTAINER)


@contextmanager
def started(cluster: Cluster, manifest: Manifest, say: Say) -> Iterator[str]:
    """Have a pod run for as long as the block does; its name. It goes even if the process is told to end.

    Args:
        cluster: Where.
        manifest: Of the pod.
        say: Tells a person what is waited for.

    Raises:
        KubernetesError: It may not be made, or does not start.
    """
    name = manifest["metadata"]["name"]
    with removed_afterwards(cluster, name):
        cluster.create(cluster.path("pods"), manifest)
        _wait_until_started(cluster, name, say)
        yield name


def _wait_until_started(cluster: Cluster, name: str, say: Say) -> None:
    said = ""
    for _ in range(int(_SECONDS_TO_START / _POLL_SECONDS)):
        pod = cluster.get(cluster.path("pods", name))
        state = container_state(pod)
        if "running" in state or "terminated" in state:
            return
        trouble = explain_pending(pod)
        words = f"{trouble.reason}: {trouble.message}" if trouble is not None else "its image is fetched and it starts"
        if words != said:
            say(f"waiting for pod {name}: {words}")
            said = words
        time.sleep(_POLL_SECONDS)
    raise KubernetesError(f"pod {name} has not started within {_SECONDS_TO_START:.0f} s: {said}")


def container_state(pod: Manifest) -> Mapping[str, Any]:
    """``state`` of the container: ``waiting``, ``running`` or ``terminated``, as that of a pod that has failed."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        state: Mapping[str, Any] = container.get("state") or {}
        if state:
            return state
    return {"terminated": {"exitCode": -1, "reason": status.get("reason")}} if status.get("phase") == "Failed" else {}


def refuse_failure(cluster: Cluster, name: str, last: str) -> None:
    """Raise if the command of a pod that has ended did not succeed.

    Args:
        cluster: Where it is.
        name: Of the pod.
        last: The last line that it printed.

    Raises:
        KubernetesError: It failed.
    """
    ended = container_state(cluster.get(cluster.path("pods", name))).get("terminated") or {}
    if ended.get("exitCode"):
        raise KubernetesError(
            f"pod {name} ended with {ended.get('reason') or 'an error'}: {last or 'it printed nothing'}"
        )


@contextmanager
def removed_afterwards(cluster: Cluster, name: str) -> Iterator[None]:
    """Delete a pod after the block, whatever ends it: an error, Ctrl-C, SIGTERM, or the end of the terminal."""
    with _signals_raise():
        try:
            yield
        finally:
            _remove(cluster, name)


def _remove(cluster: Cluster, name: str) -> None:
    """Delete the pod, whatever signal comes meanwhile."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        cluster.delete(cluster.path("pods", name), grace_seconds=0)
    except NotFoundError:
        return
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Have SIGTERM, and the end of the terminal, unwind the stack as Ctrl-C does."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
