"""What the operator knows of the cluster: FinetuneJobs from kopf's watch, everything else from reflectors."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from spotune.job import API_VERSION, KIND
from spotune_operator.children.resolved_job import JOB_LABEL
from spotune_operator.kube.client import CHILDREN, NODES, POD_MONITORS, PODS, STORAGE_CLASSES, Kube
from spotune_operator.kube.reflector import Reflector
from spotune_operator.observe.nodes import NodeView, node_view
from spotune_operator.observe.state import Child, JobKey, Pod, child_view, pod_view
from spotune_operator.settings import Settings


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A FinetuneJob as it is kept: a thousand of them are to fit into little memory.

    Attributes:
        namespace: Of the job.
        name: Of the job.
        uid: Of the object.
        version: Of the object; they grow (KEP-5504).
        generation: Of the spec.
        deleting: Whether it is on its way out.
        phase: Of its status.
        content: Spec and status, as compressed JSON: a tenth of what they take as objects.
    """

    namespace: str
    name: str
    uid: str
    version: int
    generation: int
    deleting: bool
    phase: str
    content: bytes

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """What is kept of an object as the API server has it."""
        metadata, status = body["metadata"], body.get("status") or {}
        content = json.dumps({"spec": body.get("spec"), "status": status}, separators=(",", ":"))
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            version=int(metadata["resourceVersion"]),
            generation=metadata["generation"],
            deleting="deletionTimestamp" in metadata,
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
        """The status as the API server has it; empty before there is one."""
        status: dict[str, Any] = self._part("status")
        return status

    def _part(self, name: str) -> Any:
        return json.loads(zlib.decompress(self.content))[name]


@dataclass(frozen=True)
class _Namespace:
    """What is followed in one namespace, or in all of them."""

    children: Sequence[Reflector[Child]]
    pods: Reflector[Pod]


class Caches:
    """All caches. They are filled once ``synced`` returns.

    Args:
        kube: The API server.
        settings: The operator's.
        changed: Called with a job of which something has changed.
        node_changed: Called with the name of a node that has.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        changed: Callable[[JobKey], None],
        node_changed: Callable[[str], None],
    ) -> None:
        self._jobs: dict[JobKey, KnownJob] = {}
        self._changed = changed
        self._node_changed = node_changed
        wanted = [each for each in CHILDREN.values() if each is not POD_MONITORS or settings.monitoring_namespace]
        self._namespaces = {
            name: _Namespace(
                [
                    Reflector(
                        kube, each, partial(child_view, kind=each.kind), _key, changed, labels=JOB_LABEL, namespace=name
                    )
                    for each in wanted
                ],
                Reflector(kube, PODS, pod_view, _key_of_ray_pod, changed, labels=JOB_LABEL, namespace=name),
            )
            for name in settings.namespaces
        }
        self._nodes = Reflector(kube, NODES, node_view, lambda node: node.name, self._on_node)
        self._classes = Reflector(kube, STORAGE_CLASSES, _storage_class, lambda _: "all", self._on_classes)

    def reflectors(self) -> Sequence[Reflector[Any]]:
        """Everything that has to be run."""
        found: list[Reflector[Any]] = [self._nodes, self._classes]
        for each in self._namespaces.values():
            found += [*each.children, each.pods]
        return found

    async def synced(self) -> None:
        """Wait until all caches but that of FinetuneJobs have been filled once."""
        await asyncio.gather(*(reflector.synced.wait() for reflector in self.reflectors()))

    # FinetuneJobs

    def put_job(self, body: Mapping[str, Any]) -> None:
        """Take in a FinetuneJob, unless a newer version of it is known already."""
        job = KnownJob.of(body)
        known = self._jobs.get(job.key)
        if known is None or known.uid != job.uid or known.version <= job.version:
            self._jobs[job.key] = job

    def forget_job(self, key: JobKey) -> None:
        """A FinetuneJob is gone."""
        self._jobs.pop(key, None)

    def job(self, key: JobKey) -> KnownJob | None:
        """The newest version of a FinetuneJob."""
        return self._jobs.get(key)

    def phases(self) -> list[str]:
        """Phase of every FinetuneJob."""
        return [job.phase for job in self._jobs.values()]

    def keys(self) -> list[JobKey]:
        """Every FinetuneJob."""
        return list(self._jobs)

    # Everything else

    def children(self, key: JobKey) -> dict[str, Child]:
        """A job's children by kind; those of its name, where somebody has labelled others."""
        found = [child for reflector in self._around(key).children for child in reflector.of(key).values()]
        return {child.kind: child for child in found if child.name == f"spotune-{key[1]}"}

    def version_of(self, key: JobKey, kind: str) -> int:
        """How far the cache with a job's children of a kind has got; 0 before it has been filled."""
        return max((each.version for each in self._around(key).children if each.resource.kind == kind), default=0)

    def pods(self, key: JobKey) -> list[Pod]:
        """A job's pods by name."""
        return sorted(self._around(key).pods.of(key).values(), key=lambda pod: pod.name)

    def all_pods(self) -> list[Pod]:
        """The pods of all jobs."""
        return [pod for found in self._namespaces.values() for pod in found.pods.all()]

    def node(self, name: str) -> NodeView | None:
        """A node."""
        return next(iter(self._nodes.of(name).values()), None)

    def nodes(self) -> dict[str, NodeView]:
        """All nodes by name."""
        return {node.name: node for node in self._nodes.all()}

    def provider_ids(self) -> list[str]:
        """Of all nodes."""
        return [node.provider_id for node in self._nodes.all()]

    def storage_classes(self) -> Mapping[str, Mapping[str, Any]]:
        """StorageClasses by name."""
        return {found["metadata"]["name"]: found for found in self._classes.all()}

    def _around(self, key: JobKey) -> _Namespace:
        """What is followed in the namespace of a job."""
        return self._namespaces.get("") or self._namespaces[key[0]]

    def _on_node(self, name: str) -> None:
        self._node_changed(name)
        for key in {(pod.namespace, pod.job) for pod in self.all_pods() if pod.node == name}:
            self._changed(key)

    def _on_classes(self, _: str) -> None:
        """A class that was missing may be there now."""
        for key, job in self._jobs.items():
            if job.phase == "Stalled":
                self._changed(key)


def _key(view: Pod | Child) -> JobKey:
    return view.namespace, view.job


def _key_of_ray_pod(pod: Pod) -> JobKey | None:
    """The job of a head or a worker; other pods with its label are not the operator's."""
    return _key(pod) if pod.component in ("head", "workers") else None


def _storage_class(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = {name: raw["metadata"].get(name) for name in ("name", "annotations")}
    return {"metadata": metadata, "provisioner": raw["provisioner"], "parameters": raw.get("parameters") or {}}
