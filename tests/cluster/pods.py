"""Pods for tests: make them in one line, wait for them, run commands in them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.waiting import wait_for

SECONDS_TO_RUN = 120.0
TOLERATES_ALL = [{"operator": "Exists"}]


def pod(
    name: str,
    image: str,
    command: Sequence[str] = ("sleep", "infinity"),
    *,
    node: str = "",
    claims: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    limits: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A pod with one container that is not restarted.

    Args:
        name: The pod's name.
        image: The container's image, which must be on the node.
        command: The container's command.
        node: The node of the pod, "" for any.
        claims: PersistentVolumeClaims by mount path.
        labels: The pod's labels.
        limits: Resource limits; the requests are the same.
    """
    mounts = list((claims or {}).items())
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "resources": {"limits": dict(limits or {})},
        "volumeMounts": [{"name": f"claim-{index}", "mountPath": path} for index, (path, _) in enumerate(mounts)],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "tolerations": TOLERATES_ALL,
        "containers": [container],
        "volumes": [
            {"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}}
            for index, (_, claim) in enumerate(mounts)
        ],
    }
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": dict(labels or {})}, "spec": spec}


def restricted(template: dict[str, Any]) -> dict[str, Any]:
    """The pod with user 1000 and all other settings that restricted pod security requires."""
    spec = template["spec"]
    spec["securityContext"] = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec["containers"][0]["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return template


def claim(name: str, size: str, storage_class: str) -> dict[str, Any]:
    """A PersistentVolumeClaim for a ReadWriteMany volume."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": size}},
        },
    }


def wait_until_running(kubectl: Kubectl, *names: str, seconds: float = SECONDS_TO_RUN) -> None:
    """Wait until pods are Ready; the error shows the state of each one."""
    try:
        pods = [f"pod/{name}" for name in names]
        kubectl("wait", "--for=condition=Ready", f"--timeout={seconds:.0f}s", *pods, timeout=seconds + 20)
    except KubectlError as error:
        raise KubectlError(f"{error}\n{kubectl('get', 'pods,events', '--output=wide')}") from error


def wait_until_done(kubectl: Kubectl, name: str, seconds: float = SECONDS_TO_RUN) -> str:
    """Wait until a pod has ended; returns its phase (Succeeded or Failed)."""

    def ended() -> str | None:
        phase: str = kubectl.get("pod", name)["status"].get("phase", "")
        return phase if phase in {"Succeeded", "Failed"} else None

    return wait_for(f"end of pod {name}", seconds, ended, every=0.3)


def run_in(kubectl: Kubectl, name: str, *command: str) -> str:
    """Run a command in a pod; returns its output. If it fails, KubectlError has its standard error."""
    return kubectl("exec", name, "--", *command)


def events(kubectl: Kubectl, name: str) -> list[str]:
    """The Events of an object, as `Reason: message`."""
    found = kubectl.get("events", f"--field-selector=involvedObject.name={name}")
    return [f"{event['reason']}: {event['message']}" for event in found]


def as_json(*objects: Mapping[str, Any]) -> str:
    """Manifests for `kubectl apply --filename=-`."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
