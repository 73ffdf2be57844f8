"""A temporary pod that mounts a job's volume read-only, to read logs and reports when there is no head pod.

If a bucket keeps the job, the pod downloads its state and logs first, to a directory of its own.

It copies admission, scheduling and image-pull settings from the head pod, so it can run wherever the head can. It does
not have the job label, because the operator counts the pods with that label.
"""

from __future__ import annotations

import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, Final

from spotune.custom_resource import API_VERSION
from spotune.custom_resource.object_names import DATA_VOLUME, SUPERVISOR_CONTAINER
from spotune.custom_resource.pod_problems import pod_problem
from spotune.errors import KubernetesError, NotFoundError, UsageError
from spotune.job import KIND
from spotune_client.cluster.api_errors import is_final
from spotune_client.cluster.client import Cluster, Manifest
from spotune_client.cluster.jobs import Job, status_of

Notify = Callable[[str], None]
HeadTemplate = Callable[[Job], Mapping[str, Any]]
"""Finds the pod template of a job's head."""

CONTAINER: Final = "reader"
_FROM_BUCKET: Final = ("python", "-m", "spotune_trainer.bucket.read_state")
_COPIED_FROM_HEAD: Final = (
    *("affinity", "imagePullSecrets", "nodeSelector", "runtimeClassName", "schedulerName", "securityContext"),
    "tolerations",
)
_ENVIRONMENT: Final = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}  # noqa: S108 - the pod's own
_STORES: Final = ("AWS_", "S3_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST")
_RESOURCES: Final = {
    "requests": {"cpu": "50m", "memory": "128Mi"},
    "limits": {"cpu": "1", "memory": "2Gi"},
}
_SECONDS_TO_START: Final = 600.0
_POLL_SECONDS: Final = 1.0


class PodFailedError(KubernetesError):
    """A temporary pod does not start, or its command has failed."""


def job_directory(job: Job, head_template: HeadTemplate) -> str:
    """Path of the job's folder inside its pods."""
    return _option(_supervisor(head_template(job)), "--directory")


def volume_pod_manifest(
    job: Job, purpose: str, command: Sequence[str], seconds: int, head_template: HeadTemplate
) -> Manifest:
    """Manifest of a pod that runs a command with the job's image on the job's volume.

    Args:
        job: The job as the API server returns it.
        purpose: Part of the pod's name.
        command: Command to run.
        seconds: Deadline after which the kubelet stops the pod, in case this process is killed before it deletes it.
        head_template: Finds the template whose placement and image the pod copies.
    """
    metadata, template = job["metadata"], head_template(job)
    spec, supervisor = template["spec"], _supervisor(template)
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": metadata["name"], "uid": metadata["uid"]}
    bucket = _option(supervisor, "--bucket")
    mounts = [
        {**mount, **({} if bucket else {"readOnly": True})}
        for mount in supervisor["volumeMounts"]
        if mount["name"] == DATA_VOLUME
    ]
    volumes = [volume for volume in spec["volumes"] if volume["name"] == DATA_VOLUME]
    if bucket:
        volumes = [{"name": DATA_VOLUME, "emptyDir": {}}]
        command = [*_FROM_BUCKET, bucket, _option(supervisor, "--directory"), *command]
    container = {
        "name": CONTAINER,
        "image": (status_of(job).get("pinned") or {}).get("image") or supervisor["image"],
        "imagePullPolicy": supervisor.get("imagePullPolicy", "IfNotPresent"),
        "command": list(command),
        "env": [
            *({"name": name, "value": value} for name, value in _ENVIRONMENT.items()),
            *(_store_variables(supervisor) if bucket else ()),
        ],
        **({"envFrom": supervisor["envFrom"]} if bucket and "envFrom" in supervisor else {}),
        "resources": _RESOURCES,
        "securityContext": supervisor["securityContext"],
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            # Not a server-generated name, so that the pod can be deleted even if the create response is lost.
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
            **{name: spec[name] for name in _COPIED_FROM_HEAD if name in spec},
            **{name: spec[name] for name in ("serviceAccountName",) if bucket and name in spec},
            "activeDeadlineSeconds": seconds,
            "automountServiceAccountToken": bool(bucket) and spec.get("automountServiceAccountToken", False),
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": volumes,
        },
    }


def _option(supervisor: Mapping[str, Any], name: str) -> str:
    """The value of an option of the supervisor's command; empty without it."""
    command = [str(part) for part in supervisor["command"]]
    return command[command.index(name) + 1] if name in command else ""


def _store_variables(supervisor: Mapping[str, Any]) -> list[Any]:
    """Variables of the supervisor by which it reaches its bucket."""
    return [each for each in supervisor.get("env", ()) if each["name"].startswith(_STORES)]


def pinned_template(job: Job) -> Mapping[str, Any]:
    """The head's pod template of a job that has started.

    Raises:
        UsageError: It has not started.
    """
    pinned = status_of(job).get("pinned")
    if not pinned:
        raise UsageError(f"{job['metadata']['name']} has not started yet, so it has no logs and no report")
    template: Mapping[str, Any] = json.loads(pinned["rayCluster"])["headGroupSpec"]["template"]
    return template


def _supervisor(template: Mapping[str, Any]) -> Mapping[str, Any]:
    containers: list[Mapping[str, Any]] = template["spec"]["containers"]
    return next(container for container in containers if container["name"] == SUPERVISOR_CONTAINER)


@contextmanager
def running_pod(cluster: Cluster, manifest: Manifest, notify: Notify) -> Iterator[str]:
    """Run a pod for the duration of the block, and yield its name. The pod is deleted even on SIGTERM.

    Args:
        cluster: The cluster to run it in.
        manifest: Manifest of the pod.
        notify: Prints a progress message.

    Raises:
        KubernetesError: The pod cannot be created.
        PodFailedError: It does not start.
    """
    name = manifest["metadata"]["name"]
    with deleted_on_exit(cluster, name):
        cluster.create(cluster.path("pods"), manifest)
        _wait_until_started(cluster, name, notify)
        yield name


def _wait_until_started(cluster: Cluster, name: str, notify: Notify) -> None:
    last_state, deadline = "", time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline:
        state = _startup(cluster, name)
        if not state:
            return
        if state != last_state:
            notify(f"waiting for pod {name}: {state}")
            last_state = state
        time.sleep(_POLL_SECONDS)
    raise PodFailedError(f"pod {name} has not started within {_SECONDS_TO_START:.0f} s: {last_state}")


def _startup(cluster: Cluster, name: str) -> str:
    """What a pod waits for until it starts, or why that is not known at the moment; empty once it has started."""
    try:
        pod = cluster.get(cluster.path("pods", name))
    except KubernetesError as error:
        if is_final(error):
            raise
        return f"{error}; retrying"
    state = container_state(pod)
    if "running" in state or "terminated" in state:
        return ""
    problem = pod_problem(pod)
    return f"{problem.reason}: {problem.message}" if problem is not None else "pulling its image and starting"


def container_state(pod: Manifest) -> Mapping[str, Any]:
    """``state`` of the container: ``waiting``, ``running`` or ``terminated``; a failed pod counts as terminated."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        state: Mapping[str, Any] = container.get("state") or {}
        if state:
            return state
    return {"terminated": {"exitCode": -1, "reason": status.get("reason")}} if status.get("phase") == "Failed" else {}


def raise_if_failed(cluster: Cluster, name: str, last: str) -> None:
    """Raise if the command of a terminated pod has failed.

    Args:
        cluster: The cluster with the pod.
        name: Name of the pod.
        last: The last line that the pod printed.

    Raises:
        PodFailedError: The exit code is not 0.
    """
    ended = container_state(cluster.get(cluster.path("pods", name))).get("terminated") or {}
    if ended.get("exitCode"):
        raise PodFailedError(
            f"pod {name} terminated with {ended.get('reason') or 'an error'}: {last or 'it printed nothing'}"
        )


@contextmanager
def deleted_on_exit(cluster: Cluster, name: str) -> Iterator[None]:
    """Delete a pod after the block, also on an error, Ctrl-C, SIGTERM or SIGHUP."""
    is_main = threading.current_thread() is threading.main_thread()  # Python handles signals in it alone
    with _signals_as_exceptions() if is_main else nullcontext():
        try:
            yield
        finally:
            _delete(cluster, name) if is_main else _delete_pod(cluster, name)


def _delete(cluster: Cluster, name: str) -> None:
    """Delete the pod, and ignore signals in the meantime."""
    previous = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        _delete_pod(cluster, name)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _delete_pod(cluster: Cluster, name: str) -> None:
    with suppress(NotFoundError):
        cluster.delete(cluster.path("pods", name), grace_seconds=0)


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that they unwind the stack as Ctrl-C does."""

    def exit_process(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, exit_process) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
