"""Checks that the user has the permissions that the commands need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spotune.crd.definition import GROUP, PLURAL, SERVICE_PLURAL, SWEEP_PLURAL
from spotune_operator.cli.doctor.check import Check, failed, passed, warning


@dataclass(frozen=True)
class Permission:
    """A permission, and the commands that need it.

    Attributes:
        group: API group; empty for the core group.
        resource: Resource, with a subresource after a slash.
        verbs: Required verbs.
        purpose: What does not work without it.
        essential: Whether no command works without it.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    purpose: str
    essential: bool = False


PERMISSIONS: Final = (
    Permission(GROUP, PLURAL, ("get", "list"), "every command", essential=True),
    Permission(GROUP, PLURAL, ("create", "patch", "delete"), "applying, suspending, resuming and deleting jobs"),
    Permission(GROUP, SERVICE_PLURAL, ("get", "list"), "status, logs and events of services"),
    Permission(GROUP, SERVICE_PLURAL, ("create", "patch", "delete"), "applying, suspending and deleting services"),
    Permission(GROUP, SWEEP_PLURAL, ("get", "list"), "sweep"),
    Permission("", "pods", ("get", "list"), "logs, events, status of a service, suspend --wait"),
    # The API server requires `get` for a WebSocket, and since Kubernetes 1.35 also `create`.
    Permission("", "pods/portforward", ("get", "create"), "logs, tensorboard"),
    Permission("", "pods", ("create", "delete"), "tensorboard, and logs of a job without a head"),
    Permission("", "pods/log", ("get",), "tensorboard, logs of services, and logs of a job without a head"),
    Permission("", "events", ("list",), "events, status of a service"),
)


def review(permission: Permission, verb: str, namespace: str) -> dict[str, Any]:
    """A ``SelfSubjectAccessReview`` for one verb."""
    resource, _, subresource = permission.resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": permission.group, "resource": resource}
    if subresource:
        attributes["subresource"] = subresource
    spec = {"resourceAttributes": attributes}
    return {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}


def permissions(namespace: str, create_review: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Check:
    """The permissions that the user lacks in a namespace.

    Args:
        namespace: Namespace to check.
        create_review: Sends a review to the API server and returns the response.
    """
    missing: dict[Permission, list[str]] = {}
    for permission in PERMISSIONS:
        for verb in permission.verbs:
            if not create_review(review(permission, verb, namespace))["status"].get("allowed"):
                missing.setdefault(permission, []).append(verb)
    if not missing:
        return passed("permissions", f"you have all permissions that the commands need in namespace {namespace}")
    listed = [
        f"{' and '.join(verbs)} {permission.resource} ({permission.purpose})" for permission, verbs in missing.items()
    ]
    message = f"in namespace {namespace} you may not {'; '.join(listed)}"
    remedy = "ask for the Role in docs/how-to/from-the-terminal.md in this namespace, or use another --namespace"
    essential = any(permission.essential for permission in missing)
    return failed("permissions", message, remedy) if essential else warning("permissions", message, remedy)
