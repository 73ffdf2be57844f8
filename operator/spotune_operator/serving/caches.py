"""Caches of ModelServices, their children and their pods, each filled by a reflector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from spotune.service import SERVICE_KIND
from spotune_operator.children.serving.resolved_service import SERVICE_LABEL
from spotune_operator.kube.applier import ChildKey
from spotune_operator.kube.cached_resource import CachedResource, WrittenVersions
from spotune_operator.kube.client import (
    HTTP_ROUTES,
    MODEL_SERVICES,
    POD_MONITORS,
    PODS,
    RAY_CLUSTERS,
    SERVICE_CHILDREN,
    Kube,
)
from spotune_operator.kube.reflector import Reflector
from spotune_operator.serving.scaling import RayClusterView, ray_cluster_view
from spotune_operator.serving.state import (
    ServiceChild,
    ServiceKey,
    ServicePod,
    service_child_view,
    service_pod_view,
)
from spotune_operator.settings import Settings


class CachedService(CachedResource):
    """A ModelService in the cache."""

    kind = SERVICE_KIND

    @cached_property
    def jobs(self) -> set[str]:
        """Names of the FinetuneJobs that it names. Each event of a job asks all services."""
        return {part["finetuneJob"] for part in self._sources if part.get("finetuneJob")}

    @property
    def claims(self) -> list[str]:
        """Names of the claims that it names."""
        claims = [part.get("claim") for part in self._sources]
        return [claim["name"] for claim in claims if isinstance(claim, dict) and claim.get("name")]

    @property
    def _sources(self) -> list[dict[str, Any]]:
        """Where model and adapters come from."""
        spec = self.spec if isinstance(self.spec, dict) else {}
        parts = [spec.get("model"), *(spec.get("adapters") or ())]
        return [part for part in parts if isinstance(part, dict)]


@dataclass(frozen=True)
class _Namespace:
    """The reflectors of one namespace, or of all namespaces."""

    services: Reflector[CachedService]
    children: Sequence[Reflector[ServiceChild]]
    clusters: Reflector[RayClusterView]
    pods: Reflector[ServicePod]


class ServiceCaches:
    """All caches of services. They are complete once ``synced`` returns, except that of HTTPRoutes.

    Args:
        kube: The API server.
        settings: The operator's.
        changed: Called with the key of a service when it or one of its objects changes.
    """

    def __init__(self, kube: Kube, settings: Settings, changed: Callable[[ServiceKey], None]) -> None:
        kinds = [
            each for each in SERVICE_CHILDREN.values() if each is not POD_MONITORS or settings.monitoring_namespace
        ]
        self._written: WrittenVersions[CachedService] = WrittenVersions()
        self._namespaces = {
            name: _Namespace(
                Reflector(kube, MODEL_SERVICES, CachedService.of, lambda found: found.key, changed, namespace=name),
                [
                    Reflector(
                        kube,
                        each,
                        partial(service_child_view, kind=each.kind),
                        _key,
                        changed,
                        labels=SERVICE_LABEL,
                        namespace=name,
                    )
                    for each in kinds
                ],
                Reflector(kube, RAY_CLUSTERS, ray_cluster_view, _key, changed, labels=SERVICE_LABEL, namespace=name),
                Reflector(kube, PODS, service_pod_view, _key, changed, labels=SERVICE_LABEL, namespace=name),
            )
            for name in settings.namespaces
        }

    def reflectors(self) -> Sequence[Reflector[Any]]:
        """All reflectors; the caller runs them."""
        found: list[Reflector[Any]] = []
        for each in self._namespaces.values():
            found += [each.services, *each.children, each.clusters, each.pods]
        return found

    async def synced(self) -> None:
        """Wait until all caches are filled, but that of HTTPRoutes.

        An operator whose roles are of a version before HTTPRoutes cannot list them. Applying one again changes nothing.
        """
        needed = [reflector for reflector in self.reflectors() if reflector.resource is not HTTP_ROUTES]
        await asyncio.gather(*(reflector.synced.wait() for reflector in needed))

    def service(self, key: ServiceKey) -> CachedService | None:
        """A ModelService, in the newest version known; None if there is none of this key."""
        found = next(iter(self._namespace_of(key).services.of(key).values()), None)
        return self._written.newest(key, found)

    def put_written(self, raw: Mapping[str, Any]) -> None:
        """Store a service as returned by a write, until the watch reports that version."""
        self._written.put(CachedService.of(raw))

    def serving(self, namespace: str, job: str) -> list[ServiceKey]:
        """Keys of the services that name this FinetuneJob."""
        services = self._namespace_of((namespace, "")).services.all()
        return [found.key for found in services if found.namespace == namespace and job in found.jobs]

    def children(self, service: CachedService) -> dict[ChildKey, ServiceChild]:
        """A service's children by kind and name; an object with its label but another owner is none of them."""
        found = [child for each in self._namespace_of(service.key).children for child in each.of(service.key).values()]
        return {(child.kind, child.name): child for child in found if child.owner == service.uid}

    def clusters(self, key: ServiceKey) -> list[RayClusterView]:
        """The RayClusters of a service, sorted by name."""
        return sorted(self._namespace_of(key).clusters.of(key).values(), key=lambda cluster: cluster.name)

    def pods(self, key: ServiceKey) -> list[ServicePod]:
        """A service's pods, sorted by name."""
        return sorted(self._namespace_of(key).pods.of(key).values(), key=lambda pod: pod.name)

    def on_node(self, node: str) -> set[ServiceKey]:
        """Keys of the services with a pod on a node."""
        return {_key(pod) for each in self._namespaces.values() for pod in each.pods.all() if pod.node == node}

    def version_of(self, key: ServiceKey, kind: str) -> int:
        """The ``resourceVersion`` that the cache of a kind has reached; 0 before it is filled."""
        return max((each.version for each in self._namespace_of(key).children if each.resource.kind == kind), default=0)

    def _namespace_of(self, key: ServiceKey) -> _Namespace:
        return self._namespaces.get("") or self._namespaces[key[0]]


def _key(view: ServicePod | ServiceChild | RayClusterView) -> ServiceKey:
    return view.namespace, view.service
