"""Whether the cluster's nodes can have an image: by a pod that runs `true`."""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

from spotune_operator.cli.cluster.client import Cluster, Manifest
from spotune_operator.cli.cluster.volume_pod import Say, container_state, removed_afterwards
from spotune_operator.cli.doctor.check import Check, failed, passed
from spotune_operator.observe.pod_problems import explain_pending

_CONTAINER: Final = "true"
_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 1.0
_GIVEN_UP: Final = frozenset({"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
_PULLED: Final = frozenset({"CreateContainerError", "RunContainerError", "CrashLoopBackOff"})
"""Why a container waits whose image is there: it has no `true`, say."""


def image_pull(cluster: Cluster, image: str, say: Say) -> Check:
    """Have some node fetch an image.

    Args:
        cluster: Where.
        image: Its name.
        say: Tells a person what is waited for.

    Raises:
        KubernetesError: The pod may not be made.
    """
    manifest = probe_pod(image, cluster.namespace)
    name = manifest["metadata"]["name"]
    with removed_afterwards(cluster, name):
        cluster.create(cluster.path("pods"), manifest)
        said = ""
        end = time.monotonic() + _SECONDS
        while True:
            pod = cluster.get(cluster.path("pods", name))
            if (check := verdict(image, pod)) is not None:
                return check
            trouble = explain_pending(pod)
            words = f"{trouble.reason}: {trouble.message}" if trouble is not None else f"{image} is fetched"
            if time.monotonic() > end:
                return failed(
                    "image", f"{image} is not there after {_SECONDS:.0f} s: {words}", "try again, or mend that"
                )
            if words != said:
                say(f"waiting for pod {name}: {words}")
                said = words
            time.sleep(_POLL_SECONDS)


def probe_pod(image: str, namespace: str) -> Manifest:
    """A pod that does nothing, in the way that the strictest namespaces ask for."""
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["true"],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
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
    """What a probe's pod shows; None while it shows nothing yet."""
    state = container_state(pod)
    waiting = (state.get("waiting") or {}).get("reason", "")
    if waiting in _GIVEN_UP:
        trouble = explain_pending(pod)
        why = trouble.message.removeprefix(f"container {_CONTAINER}: ") if trouble is not None else waiting
        remedy = "check the name, and that the nodes, or an imagePullSecret of the service account, may have it"
        return failed("image", why if image in why else f"{image}: {why}", remedy)
    if waiting in _PULLED or "running" in state or "terminated" in state:
        return passed("image", f"node {pod['spec'].get('nodeName')} has {image}")
    return None
