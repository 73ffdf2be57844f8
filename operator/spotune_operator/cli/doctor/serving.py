"""Checks that the operator reconciles ModelServices, and that it has the rights for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from spotune.crd.definition import GROUP, SERVICE_PLURAL
from spotune_operator.cli.doctor.check import Check, Forbidden, failed, passed, warning
from spotune_operator.cli.doctor.control_plane import operator_deployment
from spotune_operator.cli.doctor.permissions import Permission, review
from spotune_operator.errors import RefusedError

Manifest = Mapping[str, Any]

OPERATOR_RIGHTS: Final = (
    Permission(GROUP, SERVICE_PLURAL, ("list", "watch"), "finding services"),
    Permission(GROUP, f"{SERVICE_PLURAL}/status", ("patch",), "writing their status"),
    Permission("ray.io", "rayservices", ("create", "patch", "delete"), "their Ray clusters"),
    Permission("", "services", ("create", "patch"), "their endpoints"),
    Permission("policy", "poddisruptionbudgets", ("create", "patch", "delete"), "their gateways"),
    Permission("networking.k8s.io", "ingresses", ("create", "patch", "delete"), "their Ingresses"),
    Permission("gateway.networking.k8s.io", "httproutes", ("create", "patch", "delete"), "their HTTPRoutes"),
)
"""What the chart grants with ``serving.enabled``, beyond the rights for jobs."""
_SWITCH: Final = "SPOTUNE_OPERATOR_SERVING"
_ENABLE: Final = "helm upgrade spotune charts/spotune --namespace {} --reuse-values --set serving.enabled=true"


def serving(
    deployments: Sequence[Manifest] | Forbidden,
    services: Sequence[Manifest],
    create_review: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> Check:
    """Whether the operator reconciles ModelServices.

    Args:
        deployments: The cluster's Deployments.
        services: The ModelServices of the namespace.
        create_review: Sends a ``SubjectAccessReview`` to the API server and returns the response.
    """
    name = "serving"
    if isinstance(deployments, Forbidden):
        return warning(name, f"cannot check whether ModelServices are enabled: {deployments.reason}")
    operator = operator_deployment(deployments)
    if operator is None:
        return warning(name, "cannot check whether ModelServices are enabled without the operator's Deployment")
    enable = _ENABLE.format(operator["metadata"]["namespace"])
    if not _is_enabled(operator):
        if not services:
            return passed(name, "the operator runs without ModelServices (chart value serving.enabled)")
        message = f"the operator runs without ModelServices: the {len(services)} of this namespace will not start"
        return failed(name, message, f"enable them: {enable}")
    try:
        missing = [*_missing(operator, services, create_review)]
    except RefusedError:
        return passed(name, "the operator reconciles ModelServices; you may not check its rights")
    if missing:
        message = f"the operator may not {'; '.join(missing)}"
        return failed(name, message, f"grant the rights of the chart (rbac.create): {enable} --set rbac.create=true")
    return passed(name, "the operator reconciles ModelServices, and has the rights for them")


def _is_enabled(operator: Manifest) -> bool:
    variables = operator["spec"]["template"]["spec"]["containers"][0].get("env") or ()
    return any(each["name"] == _SWITCH and each.get("value") == "true" for each in variables)


def _missing(
    operator: Manifest, services: Sequence[Manifest], create_review: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> Sequence[str]:
    """The rights that the operator's service account lacks, for display."""
    home = operator["metadata"]["namespace"]
    account = operator["spec"]["template"]["spec"].get("serviceAccountName") or "default"
    namespace = services[0]["metadata"]["namespace"] if services else home
    found = []
    for right in OPERATOR_RIGHTS:
        body = {verb: review(right, verb, namespace) for verb in right.verbs}
        denied = [
            verb for verb, each in body.items() if not create_review(_of(each, home, account))["status"]["allowed"]
        ]
        if denied:
            found.append(f"{' and '.join(denied)} {right.resource} ({right.purpose})")
    return found


def _of(own: Mapping[str, Any], namespace: str, account: str) -> dict[str, Any]:
    """A review of the user's own rights, turned into one of a service account's."""
    spec = {**own["spec"], "user": f"system:serviceaccount:{namespace}:{account}"}
    return {**own, "kind": "SubjectAccessReview", "spec": spec}
