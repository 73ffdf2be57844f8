"""Caches of the observed objects: FinetuneJobs from kopf's watch, all others from reflectors."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from spotune.custom_resource import API_VERSION
from spotune.job import KIND
from spotune.units.timestamps import unix_time
from spotune_operator.children.resolved_job import JOB_LABEL
from spotune_operator.kube.client import (
    CHILDREN,
    MODEL_SERVICES,
    NODES,
    POD_MONITORS,
    PODS,
    STORAGE_CLASSES,
    Kube,
)
from spotune_operator.kube.reflector import Reflector
from spotune_operator.observe.job_services import JobService, job_service_view
from spotune_operator.observe.nodes import NodeView, node_view
from spotune_operator.observe.state import Child, JobKey, Pod, child_view, pod_view
from spotune_operator.settings import Settings


@dataclass(frozen=True, slots=True)
class CachedJob:
    """A FinetuneJob in the cache, compact enough for a thousand of them.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        uid: Its uid.
        version: Its ``resourceVersion``; versions increase (KEP-5504).
        generation: Its ``metadata.generation``.
        deleting: Whether it is being deleted.
        created: Unix time of its creation.
        phase: ``status.phase``.
        content: Spec and status as compressed JSON, which takes a tenth of the memory of Python objects.
    """

    namespace: str
    name: str
    uid: str
    version: int
    generation: int
    deleting: bool
    created: float
    phase: str
    content: bytes

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The cached form of an object of the API server."""
        metadata, status = body["metadata"], body.get("status") or {}
        content = json.dumps({"spec": body.get("spec"), "status": status}, separators=(",", ":"))
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            version=int(metadata["resourceVersion"]),
            generation=metadata["generation"],
            deleting="deletionTimestamp" in metadata,
            created=unix_time(metadata.get("creationTimestamp")) or 0.0,
            phase=str(status.get("phase", "")),
            content=zlib.compress(content.encode(), 1),
        )

    @property
    def key(self) -> JobKey:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def body(self) -> dict[str, Any]:
        """The object without its status."""
        metadata = {"name": self.name, "namespace": self.namespace}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": self._part("spec")}

    @property
    def status(self) -> dict[str, Any]:
        """The status of the API server; empty before the first reconcile."""
        status: dict[str, Any] = self._part("status")
        return status

    def _part(self, name: str) -> Any:
        return json.loads(zlib.decompress(self.content))[name]


@dataclass(frozen=True)
class _Namespace:
    """The reflectors of one namespace, or of all namespaces."""

    children: Sequence[Reflector[Child]]
    pods: Reflector[Pod]
    services: Reflector[JobService] | None
    """None while the operator serves no models: it has no right to list ModelServices then."""


class Caches:
    """All caches. They are complete once ``synced`` returns.

    Args:
        kube: The API server.
        settings: The operator's.
        changed: Called with the key of a job when one of its objects changes.
        node_changed: Called with the name of a node when it changes.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        changed: Callable[[JobKey], None],
        node_changed: Callable[[str], None],
    ) -> None:
        self._jobs: dict[JobKey, CachedJob] = {}
        self._changed = changed
        self._node_changed = node_changed
        resources = [each for each in CHILDREN.values() if each is not POD_MONITORS or settings.monitoring_namespace]
        self._namespaces = {
            name: _Namespace(
                [
                    Reflector(
                        kube, each, partial(child_view, kind=each.kind), _key, changed, labels=JOB_LABEL, namespace=name
                    )
                    for each in resources
                ],
                Reflector(kube, PODS, pod_view, _key_of_ray_pod, changed, labels=JOB_LABEL, namespace=name),
                Reflector(kube, MODEL_SERVICES, job_service_view, _key, changed, labels=JOB_LABEL, namespace=name)
                if settings.serving
                else None,
            )
            for name in settings.namespaces
        }
        self._nodes = Reflector(kube, NODES, node_view, lambda node: node.name, self._on_node)
        self._classes = Reflector(kube, STORAGE_CLASSES, _storage_class, lambda _: "all", self._on_classes)

    def reflectors(self) -> Sequence[Reflector[Any]]:
        """All reflectors; the caller runs them."""
        found: list[Reflector[Any]] = [self._nodes, self._classes]
        for each in self._namespaces.values():
            found += [*each.children, each.pods, *([each.services] if each.services is not None else ())]
        return found

    async def synced(self) -> None:
        """Wait until all caches but that of FinetuneJobs are filled."""
        await asyncio.gather(*(reflector.synced.wait() for reflector in self.reflectors()))

    # FinetuneJobs

    def put_job(self, body: Mapping[str, Any]) -> None:
        """Store a FinetuneJob, unless the cache has a newer version."""
        job = CachedJob.of(body)
        known = self._jobs.get(job.key)
        if known is None or known.uid != job.uid or known.version <= job.version:
            self._jobs[job.key] = job

    def forget_job(self, key: JobKey) -> None:
        """Remove a deleted FinetuneJob."""
        self._jobs.pop(key, None)

    def job(self, key: JobKey) -> CachedJob | None:
        """A FinetuneJob; None if the cache has none of this key."""
        return self._jobs.get(key)

    def phases(self) -> list[str]:
        """The phases of all FinetuneJobs."""
        return [job.phase for job in self._jobs.values()]

    def keys(self) -> list[JobKey]:
        """The keys of all FinetuneJobs."""
        return list(self._jobs)

    # Everything else

    def children(self, key: JobKey) -> dict[str, Child]:
        """A job's children by kind; an object with its label but another name is none of them."""
        found = [child for reflector in self._namespace_of(key).children for child in reflector.of(key).values()]
        return {child.kind: child for child in found if child.name == f"spotune-{key[1]}"}

    def services(self, job: CachedJob) -> dict[str, JobService]:
        """The ModelServices that a job controls, by name; one with its label but another owner is none of them."""
        services = self._namespace_of(job.key).services
        found = services.of(job.key).values() if services is not None else ()
        return {service.name: service for service in found if service.owner == job.uid}

    def version_of(self, key: JobKey, kind: str) -> int:
        """The ``resourceVersion`` that the cache of a kind has reached; 0 before it is filled."""
        found = self._namespace_of(key)
        reflectors: list[Reflector[Any]] = [*found.children, *([found.services] if found.services is not None else ())]
        return max((each.version for each in reflectors if each.resource.kind == kind), default=0)

    def pods(self, key: JobKey) -> list[Pod]:
        """A job's pods, sorted by name."""
        return sorted(self._namespace_of(key).pods.of(key).values(), key=lambda pod: pod.name)

    def all_pods(self) -> list[Pod]:
        """The pods of all jobs."""
        return [pod for found in self._namespaces.values() for pod in found.pods.all()]

    def node(self, name: str) -> NodeView | None:
        """A node; None if there is none of this name."""
        return next(iter(self._nodes.of(name).values()), None)

    def nodes(self) -> dict[str, NodeView]:
        """All nodes by name."""
        return {node.name: node for node in self._nodes.all()}

    def all_nodes(self) -> list[NodeView]:
        """All nodes."""
        return list(self._nodes.all())

    def provider_ids(self) -> list[str]:
        """``spec.providerID`` of all nodes."""
        return [node.provider_id for node in self._nodes.all()]

    def storage_classes(self) -> Mapping[str, Mapping[str, Any]]:
        """StorageClasses by name."""
        return {found["metadata"]["name"]: found for found in self._classes.all()}

    def _namespace_of(self, key: JobKey) -> _Namespace:
        """The reflectors of the namespace of a job."""
        return self._namespaces.get("") or self._namespaces[key[0]]

    def _on_node(self, name: str) -> None:
        self._node_changed(name)
        for key in {(pod.namespace, pod.job) for pod in self.all_pods() if pod.node == name}:
            self._changed(key)

    def _on_classes(self, _: str) -> None:
        """Reconcile stalled jobs: the storage class that they lack may exist now."""
        for key, job in self._jobs.items():
            if job.phase == "Stalled":
                self._changed(key)


def _key(view: Pod | Child | JobService) -> JobKey:
    return view.namespace, view.job


def _key_of_ray_pod(pod: Pod) -> JobKey | None:
    """The job of a head or worker pod; None for other pods with the job's label."""
    return _key(pod) if pod.component in ("head", "workers") else None


def _storage_class(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = {name: raw["metadata"].get(name) for name in ("name", "annotations")}
    return {"metadata": metadata, "provisioner": raw["provisioner"], "parameters": raw.get("parameters") or {}}
