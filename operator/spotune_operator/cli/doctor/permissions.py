"""What the user may do, against what the commands need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spotune.crd.definition import GROUP, PLURAL
from spotune_operator.cli.doctor.check import Check, failed, passed, warning


@dataclass(frozen=True)
class Need:
    """A right, and what it is for.

    Attributes:
        group: API group; empty for the core one.
        resource: With its subresource after a slash.
        verbs: All of which are needed.
        purpose: What does not work without.
        essential: Whether nothing works without.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    purpose: str
    essential: bool = False


NEEDS: Final = (
    Need(GROUP, PLURAL, ("get", "list"), "every command", essential=True),
    Need(GROUP, PLURAL, ("create", "patch", "delete"), "applying, suspending, resuming and deleting jobs"),
    Need("", "pods", ("get", "list"), "logs, events, suspend --wait"),
    # The API server asks for `get` of a WebSocket, and from Kubernetes 1.35 on for `create` as well.
    Need("", "pods/portforward", ("get", "create"), "logs, tensorboard"),
    Need("", "pods", ("create", "delete"), "tensorboard, and logs of a job without a head"),
    Need("", "pods/log", ("get",), "tensorboard, and logs of a job without a head"),
    Need("", "events", ("list",), "events"),
)


def review(need: Need, verb: str, namespace: str) -> dict[str, Any]:
    """The ``SelfSubjectAccessReview`` that asks for one verb."""
    resource, _, subresource = need.resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": need.group, "resource": resource}
    if subresource:
        attributes["subresource"] = subresource
    spec = {"resourceAttributes": attributes}
    return {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}


def permissions(namespace: str, ask: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Check:
    """What the user may not do in a namespace.

    Args:
        namespace: The namespace.
        ask: Sends a review to the API server; the answer.
    """
    missing: dict[Need, list[str]] = {}
    for need in NEEDS:
        for verb in need.verbs:
            if not ask(review(need, verb, namespace))["status"].get("allowed"):
                missing.setdefault(need, []).append(verb)
    if not missing:
        return passed("permissions", f"you may do all that the commands need in namespace {namespace}")
    words = [f"{' and '.join(verbs)} {need.resource} ({need.purpose})" for need, verbs in missing.items()]
    message = f"in namespace {namespace} you may not {'; '.join(words)}"
    remedy = "ask for the Role of docs/how-to/from-the-terminal.md in this namespace, or name another --namespace"
    essential = any(need.essential for need in missing)
    return failed("permissions", message, remedy) if essential else warning("permissions", message, remedy)
