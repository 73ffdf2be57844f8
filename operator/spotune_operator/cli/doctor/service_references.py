"""The objects that ModelServices name: Secrets, claims, jobs, classes, Gateways, and Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from spotune.crd.definition import GROUP, PLURAL, VERSION
from spotune_operator.cli.doctor.references import Reference, claim, secret, service_account

Manifest = Mapping[str, Any]

_JOBS: Final = f"/apis/{GROUP}/{VERSION}/namespaces"


def references(service: Manifest) -> Iterator[Reference]:
    """The objects that a service names."""
    namespace, spec = service["metadata"]["namespace"], service.get("spec") or {}
    core = f"/api/v1/namespaces/{namespace}"
    model, ingress, cluster = (spec.get(section) or {} for section in ("model", "ingress", "cluster"))
    sources = [("spec.model", model)]
    sources += [(f"spec.adapters[{number}]", adapter) for number, adapter in enumerate(spec.get("adapters") or ())]
    for field, source in sources:
        yield from _source(field, source, namespace)
    for field, given in (
        ("spec.model.tokenSecretRef", model.get("tokenSecretRef")),
        ("spec.apiKeysSecretRef", spec.get("apiKeysSecretRef")),
        ("spec.cluster.redisPasswordSecretRef", cluster.get("redisPasswordSecretRef")),
    ):
        if given:
            yield secret(field, given, namespace)
    yield from _ingress(ingress, core)
    yield from _gateways(spec.get("httpRoute") or {}, namespace)
    if priority := spec.get("priorityClassName"):
        path = f"/apis/scheduling.k8s.io/v1/priorityclasses/{priority}"
        yield Reference(
            "spec.priorityClassName",
            "PriorityClass",
            path,
            "no replica can be created",
            "create it, or correct the field",
        )
    if account := spec.get("serviceAccountName"):
        yield service_account("spec.serviceAccountName", account, namespace)
    yield from _redis(cluster.get("redisAddress") or "", namespace)


def _source(field: str, source: Mapping[str, Any], namespace: str) -> Iterator[Reference]:
    """The job or the claim of a model or adapter."""
    if job := source.get("finetuneJob"):
        path = f"{_JOBS}/{namespace}/{PLURAL}/{job}"
        effect, remedy = "the service waits for it", "apply the job, or correct the name"
        yield Reference(f"{field}.finetuneJob", "FinetuneJob", path, effect, remedy, is_essential=False)
    if name := (source.get("claim") or {}).get("name"):
        yield claim(f"{field}.claim", name, namespace, "gateway and replicas stay Pending")


def _ingress(ingress: Mapping[str, Any], core: str) -> Iterator[Reference]:
    """The class and the certificate of an Ingress. Without them the service can still be reached inside the cluster."""
    if name := ingress.get("className"):
        path = f"/apis/networking.k8s.io/v1/ingressclasses/{name}"
        effect, remedy = "no controller handles the Ingress", "install its controller, or correct the class"
        yield Reference("spec.ingress.className", "IngressClass", path, effect, remedy, is_essential=False)
    if name := ingress.get("tlsSecretName"):
        effect, remedy = (
            "the Ingress has no certificate",
            "create it, or let cert-manager do so by spec.ingress.annotations",
        )
        path = f"{core}/secrets/{name}"
        yield Reference("spec.ingress.tlsSecretName", "Secret", path, effect, remedy, "tls.crt", is_essential=False)


def _gateways(route: Mapping[str, Any], namespace: str) -> Iterator[Reference]:
    """The Gateways of an HTTPRoute. Without them the service can still be reached inside the cluster."""
    for number, parent in enumerate(route.get("parentRefs") or ()):
        home = parent.get("namespace") or namespace
        path = f"/apis/gateway.networking.k8s.io/v1/namespaces/{home}/gateways/{parent['name']}"
        effect = f"no traffic reaches the HTTPRoute (namespace {home})"
        remedy = "install the Gateway API with a controller and create the Gateway, or correct name and namespace"
        yield Reference(f"spec.httpRoute.parentRefs[{number}]", "Gateway", path, effect, remedy, is_essential=False)


def _redis(address: str, namespace: str) -> Iterator[Reference]:
    """The Service of a Redis in the cluster: of an address such as ``redis:6379`` or ``redis.team.svc:6379``."""
    host, _, port = address.rpartition(":")
    name, *domain = host.split(".")
    if not name.replace("-", "").isalnum() or (domain and domain[1:2] != ["svc"]):
        return  # an IP address, or a name outside the cluster
    path = f"/api/v1/namespaces/{domain[0] if domain else namespace}/services/{name}"
    effect, remedy = "the head cannot start", "install Redis, or correct spec.cluster.redisAddress"
    yield Reference("spec.cluster.redisAddress", "Service", path, effect, remedy, port=int(port))
