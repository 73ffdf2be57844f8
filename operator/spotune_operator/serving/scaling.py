"""Scales a running service: KubeRay copies the numbers of pods to a RayCluster only when it creates one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotune_operator.children.serving.groups import GroupSize, group_sizes
from spotune_operator.children.serving.resolved_service import SERVICE_LABEL, ResolvedService
from spotune_operator.observe.pod_problems import PodProblem, pod_problem


@dataclass(frozen=True)
class WorkerGroup:
    """A worker group of a RayCluster.

    Attributes:
        name: Its name.
        replicas: Its number of pods.
        min: The minimum for the autoscaler.
        max: The maximum for the autoscaler.
    """

    name: str
    replicas: int
    min: int
    max: int


@dataclass(frozen=True)
class RayClusterView:
    """A RayCluster that KubeRay created for a service.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        service: Name of the ModelService.
        groups: Its worker groups, in order.
        deleting: Whether it is being deleted.
        problem: Why KubeRay cannot create its pods; None if no problem is known.
    """

    namespace: str
    name: str
    service: str
    groups: Sequence[WorkerGroup] = ()
    deleting: bool = False
    problem: PodProblem | None = None


@dataclass(frozen=True)
class Resize:
    """A change of the numbers of pods of a RayCluster.

    Attributes:
        cluster: The RayCluster.
        operations: JSON patch (RFC 6902); it fails if the groups are no longer in this order.
    """

    cluster: RayClusterView
    operations: Sequence[Mapping[str, Any]]


def ray_cluster_view(raw: Mapping[str, Any]) -> RayClusterView:
    """The view of a RayCluster; KubeRay gives it the labels of its RayService."""
    metadata = raw["metadata"]
    groups = [
        WorkerGroup(
            name=group.get("groupName", ""),
            replicas=group.get("replicas") or 0,
            min=group.get("minReplicas") or 0,
            max=group.get("maxReplicas") or 0,
        )
        for group in (raw.get("spec") or {}).get("workerGroupSpecs") or ()
    ]
    return RayClusterView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        service=(metadata.get("labels") or {}).get(SERVICE_LABEL, ""),
        groups=groups,
        deleting="deletionTimestamp" in metadata,
        problem=pod_problem(raw),
    )


def cluster_resizes(resolved: ResolvedService, clusters: Sequence[RayClusterView]) -> list[Resize]:
    """The changes that give all clusters of a service the numbers of pods of its spec.

    While Ray's autoscaler runs, it sets ``replicas`` within the minimum and the maximum. A cluster with other groups
    stays as it is: KubeRay replaces it.
    """
    sizes = group_sizes(resolved)
    autoscales = resolved.service.spec.replicas.autoscales
    found = []
    for cluster in clusters:
        if cluster.deleting or [group.name for group in cluster.groups] != [size.name for size in sizes]:
            continue
        operations = [
            operation
            for number, (group, size) in enumerate(zip(cluster.groups, sizes, strict=True))
            for operation in _operations(number, group, size, autoscales=autoscales)
        ]
        if operations:
            found.append(Resize(cluster, operations))
    return found


def _operations(number: int, group: WorkerGroup, size: GroupSize, *, autoscales: bool) -> list[dict[str, Any]]:
    """The operations for one group; none if it has the right size."""
    path = f"/spec/workerGroupSpecs/{number}"
    desired = {"minReplicas": size.min, "maxReplicas": size.max}
    current = {"minReplicas": group.min, "maxReplicas": group.max}
    if not autoscales or size.min == size.max:
        desired, current = desired | {"replicas": size.min}, current | {"replicas": group.replicas}
    if desired == current:
        return []
    guard = {"op": "test", "path": f"{path}/groupName", "value": group.name}
    return [guard, *({"op": "add", "path": f"{path}/{name}", "value": value} for name, value in desired.items())]
