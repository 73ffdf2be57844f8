"""Checks that a node can pull an image, with a pod that runs `true`."""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

from spotune.custom_resource.pod_problems import pod_problem
from spotune_client.cluster.client import Cluster, Manifest
from spotune_client.cluster.volume_pod import Notify, container_state, deleted_on_exit
from spotune_operator.cli.doctor.check import Check, failed, passed

_CONTAINER: Final = "true"
_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 1.0
_PULL_FAILED: Final = frozenset({"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
_PULLED: Final = frozenset({"CreateContainerError", "RunContainerError", "CrashLoopBackOff"})
"""Waiting reasons after a successful pull, for example if the image has no `true`."""


def image_pull(cluster: Cluster, image: str, notify: Notify) -> Check:
    """Pull an image on some node.

    Args:
        cluster: The cluster to check.
        image: Name of the image.
        notify: Prints a progress message.

    Raises:
        KubernetesError: The pod cannot be created.
    """
    manifest = probe_pod(image, cluster.namespace)
    name = manifest["metadata"]["name"]
    with deleted_on_exit(cluster, name):
        cluster.create(cluster.path("pods"), manifest)
        last_state = ""
        deadline = time.monotonic() + _SECONDS
        while True:
            pod = cluster.get(cluster.path("pods", name))
            if (check := verdict(image, pod)) is not None:
                return check
            problem = pod_problem(pod)
            state_text = f"{problem.reason}: {problem.message}" if problem is not None else f"pulling {image}"
            if time.monotonic() > deadline:
                return failed(
                    "image", f"{image} was not pulled within {_SECONDS:.0f} s: {state_text}", "fix this, or try again"
                )
            if state_text != last_state:
                notify(f"waiting for pod {name}: {state_text}")
                last_state = state_text
            time.sleep(_POLL_SECONDS)


def probe_pod(image: str, namespace: str) -> Manifest:
    """Manifest of a pod that does nothing and meets the restricted Pod Security Standard."""
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["true"],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    spec = {
        "activeDeadlineSeconds": int(_SECONDS),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    labels = {"app.kubernetes.io/name": "spotune", "app.kubernetes.io/component": "doctor"}
    metadata = {"name": f"spotune-doctor-{secrets.token_hex(3)}", "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def verdict(image: str, pod: Manifest) -> Check | None:
    """The result that a probe pod's state implies; None while it is undecided."""
    state = container_state(pod)
    waiting = (state.get("waiting") or {}).get("reason", "")
    if waiting in _PULL_FAILED:
        problem = pod_problem(pod)
        cause = problem.message.removeprefix(f"container {_CONTAINER}: ") if problem is not None else waiting
        remedy = "check the name, and that the nodes or an imagePullSecret of the service account have access to it"
        return failed("image", cause if image in cause else f"{image}: {cause}", remedy)
    if waiting in _PULLED or "running" in state or "terminated" in state:
        return passed("image", f"node {pod['spec'].get('nodeName')} pulled {image}")
    return None
