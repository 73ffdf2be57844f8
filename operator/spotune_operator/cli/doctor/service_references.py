"""Checks that the objects that ModelServices name exist: Secrets, claims, jobs, classes, Gateways, and Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spotune.crd.definition import GROUP, PLURAL, VERSION
from spotune_operator.cli.doctor.check import Check, failed, passed, warning
from spotune_operator.errors import NotFoundError, RefusedError

Manifest = Mapping[str, Any]

_NAME: Final = "services"
_JOBS: Final = f"/apis/{GROUP}/{VERSION}/namespaces"


@dataclass(frozen=True)
class Reference:
    """An object that a service names.

    Attributes:
        field: Path of the field in the service.
        kind: Kind of the object.
        path: URL path of the object.
        effect: What happens without it.
        remedy: What to do without it.
        key: Of a Secret: the key that it must have; empty: none.
        port: Of a Service: the port that it must have; 0: none.
        is_essential: Whether the service cannot run without it.
    """

    field: str
    kind: str
    path: str
    effect: str
    remedy: str
    key: str = ""
    port: int = 0
    is_essential: bool = True

    @property
    def name(self) -> str:
        """Name of the object."""
        return self.path.rpartition("/")[2]


def named_objects(services: Sequence[Manifest], get: Callable[[str], Manifest]) -> Iterator[Check]:
    """One check per object that is missing or incomplete; one that passes if there is none; none without services.

    Args:
        services: The ModelServices of the namespace.
        get: Returns an object of the API server by its URL path.

    Raises:
        KubernetesError: The API server does not answer.
    """
    hidden, found_problem = dict[str, None](), False
    for service in services:
        for reference in references(service):
            try:
                problem = _problem(reference, get(reference.path))
            except NotFoundError:
                problem = f"there is no {reference.kind} {reference.name}"
            except RefusedError:
                hidden[f"{reference.kind} {reference.name}"] = None
                continue
            if problem:
                found_problem = True
                message = f"{service['metadata']['name']}: {reference.field}: {problem}: {reference.effect}"
                yield (failed if reference.is_essential else warning)(_NAME, message, reference.remedy)
    if hidden:
        yield warning(_NAME, f"you may not check whether these exist: {', '.join(hidden)}")
    elif services and not found_problem:
        yield passed(_NAME, f"all objects that the {len(services)} ModelService(s) name exist")


def references(service: Manifest) -> Iterator[Reference]:
    """The objects that a service names."""
    namespace, spec = service["metadata"]["namespace"], service.get("spec") or {}
    core = f"/api/v1/namespaces/{namespace}"
    model, ingress, cluster = (spec.get(section) or {} for section in ("model", "ingress", "cluster"))
    sources = [("spec.model", model)]
    sources += [(f"spec.adapters[{number}]", adapter) for number, adapter in enumerate(spec.get("adapters") or ())]
    for field, source in sources:
        yield from _source(field, source, namespace, core)
    for field, secret in (
        ("spec.model.tokenSecretRef", model.get("tokenSecretRef")),
        ("spec.apiKeysSecretRef", spec.get("apiKeysSecretRef")),
        ("spec.cluster.redisPasswordSecretRef", cluster.get("redisPasswordSecretRef")),
    ):
        if secret:
            yield Reference(
                field,
                "Secret",
                f"{core}/secrets/{secret['name']}",
                "pods that need it do not start",
                f"kubectl create secret generic {secret['name']} --namespace {namespace} "
                f"--from-file={secret['key']}=FILE; or correct the field",
                key=secret["key"],
            )
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
        path, effect = f"{core}/serviceaccounts/{account}", "no pod can be created"
        yield Reference("spec.serviceAccountName", "ServiceAccount", path, effect, "create it, or correct the field")
    yield from _redis(cluster.get("redisAddress") or "", namespace)


def _source(field: str, source: Mapping[str, Any], namespace: str, core: str) -> Iterator[Reference]:
    """The job or the claim of a model or adapter."""
    if job := source.get("finetuneJob"):
        path = f"{_JOBS}/{namespace}/{PLURAL}/{job}"
        effect, remedy = "the service waits for it", "apply the job, or correct the name"
        yield Reference(f"{field}.finetuneJob", "FinetuneJob", path, effect, remedy, is_essential=False)
    if claim := (source.get("claim") or {}).get("name"):
        path, effect = f"{core}/persistentvolumeclaims/{claim}", "gateway and replicas stay Pending"
        yield Reference(
            f"{field}.claim", "PersistentVolumeClaim", path, effect, "create the claim, or correct the name"
        )


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


def _problem(reference: Reference, found: Manifest) -> str:
    """What an existing object lacks; empty if nothing."""
    keys = found.get("data") or {}
    if reference.key and reference.key not in keys:
        return f"Secret {reference.name} has no key {reference.key}"
    ports = [each["port"] for each in (found.get("spec") or {}).get("ports") or ()] if reference.port else []
    if reference.port and reference.port not in ports:
        return f"Service {reference.name} has no port {reference.port}"
    return ""
