"""The HTTPRoute in front of the gateway, for clusters with the Gateway API."""

from typing import Any

from spotune_operator.children.serving.network import SERVICE_PORT
from spotune_operator.children.serving.resolved_service import ResolvedService


def http_route(resolved: ResolvedService) -> dict[str, Any] | None:
    """The HTTPRoute; None if the service has none.

    Without a timeout of its own, a route gets that of the Gateway's controller, such as the 15 s of Envoy, which end
    streams, too. The gateway of the service ends requests after ``spec.requestTimeout``.
    """
    given = resolved.service.spec.http_route
    if given is None:
        return None
    parents = [
        {"group": "gateway.networking.k8s.io", "kind": "Gateway"}
        | parent.model_dump(mode="json", exclude_defaults=True)
        for parent in given.parent_refs
    ]
    rule: dict[str, Any] = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"group": "", "kind": "Service", "name": resolved.name, "port": SERVICE_PORT}],
    }
    if given.disable_timeout:
        rule["timeouts"] = {"request": "0s"}
    manifest = resolved.owner.child("gateway.networking.k8s.io/v1", "HTTPRoute", "http-route")
    if given.annotations:
        manifest["metadata"]["annotations"] = dict(given.annotations)
    return manifest | {"spec": {"parentRefs": parents, "hostnames": list(given.hostnames), "rules": [rule]}}
