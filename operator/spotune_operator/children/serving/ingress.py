"""The Ingress in front of the gateway."""

from typing import Any

from spotune_operator.children.serving.network import HTTP_PORT
from spotune_operator.children.serving.resolved_service import ResolvedService


def ingress(resolved: ResolvedService) -> dict[str, Any] | None:
    """The Ingress; None if the service names none.

    Annotations come from the user, because each ingress controller has its own. Streams need a read timeout longer than
    the usual 60 s.
    """
    given = resolved.service.spec.ingress
    if given is None:
        return None
    backend = {"service": {"name": resolved.name, "port": {"name": HTTP_PORT}}}
    paths = [{"path": "/", "pathType": "Prefix", "backend": backend}]
    spec: dict[str, Any] = {"ingressClassName": given.class_name} if given.class_name else {}
    if given.tls_secret_name:
        spec["tls"] = [{"hosts": [given.host], "secretName": given.tls_secret_name}]
    spec["rules"] = [{"host": given.host, "http": {"paths": paths}}]
    manifest = resolved.owner.child("networking.k8s.io/v1", "Ingress", "ingress")
    if given.annotations:
        manifest["metadata"]["annotations"] = dict(given.annotations)
    return manifest | {"spec": spec}
