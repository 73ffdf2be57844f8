"""Scales a running service: KubeRay copies the numbers of pods to a RayCluster only when it creates one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotune.custom_resource.pod_problems import PodProblem, pod_problem
from spotune_operator.children.serving.groups import GroupSize, group_sizes
from spotune_operator.children.serving.resolved_service import SERVICE_LABEL, ResolvedService
from spotune_operator.observe.job_services import controller_uid


@dataclass(frozen=True)
class ReplicaPod:
    """A pod with a replica.

    Attributes:
        name: Its name.
        cluster: Its RayCluster.
        group: Its worker group.
    """

    name: str
    cluster: str
    group: str


@dataclass(frozen=True)
class WorkerGroup:
    """A worker group of a RayCluster.

    Attributes:
        name: Its name.
        replicas: Its number of pods.
        min: The minimum for the autoscaler.
        max: The maximum for the autoscaler.
        to_delete: Names of the pods that KubeRay has to delete.
    """

    name: str
    replicas: int
    min: int
    max: int
    to_delete: Sequence[str] = ()


@dataclass(frozen=True)
class RayClusterView:
    """A RayCluster that KubeRay created for a service.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        service: Name of the ModelService.
        groups: Its worker groups, in order.
        uid: Its uid.
        owner: uid of the object that controls it; empty without one.
        created: RFC 3339 time of its creation.
        deleting: Whether it is being deleted.
        problem: Why KubeRay cannot create its pods; None if no problem is known.
    """

    namespace: str
    name: str
    service: str
    groups: Sequence[WorkerGroup] = ()
    uid: str = ""
    owner: str = ""
    created: str = ""
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
            to_delete=(group.get("scaleStrategy") or {}).get("workersToDelete") or (),
        )
        for group in (raw.get("spec") or {}).get("workerGroupSpecs") or ()
    ]
    return RayClusterView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        service=(metadata.get("labels") or {}).get(SERVICE_LABEL, ""),
        groups=groups,
        uid=metadata["uid"],
        owner=controller_uid(raw),
        created=metadata.get("creationTimestamp", ""),
        deleting="deletionTimestamp" in metadata,
        problem=pod_problem(raw),
    )


def cluster_resizes(
    resolved: ResolvedService, clusters: Sequence[RayClusterView], removable: Sequence[ReplicaPod]
) -> list[Resize]:
    """The changes that give all clusters of a service the numbers of pods of its spec.

    While Ray's autoscaler runs, it sets ``replicas`` within the minimum and the maximum, and deletes idle pods. Without
    it KubeRay would delete any pods of a group that shrinks, so this names them. A cluster with other groups stays as
    it is: KubeRay replaces it.

    Args:
        resolved: The service.
        clusters: Its clusters.
        removable: Its pods with replicas, in the order in which they are to be deleted.
    """
    sizes = group_sizes(resolved)
    autoscales = resolved.service.spec.replicas.autoscales
    found = []
    for cluster in clusters:
        if cluster.deleting or [group.name for group in cluster.groups] != [size.name for size in sizes]:
            continue
        pods = [pod for pod in removable if pod.cluster == cluster.name]
        operations = [
            operation
            for number, (group, size) in enumerate(zip(cluster.groups, sizes, strict=True))
            for operation in _operations(
                number, group, size, [pod.name for pod in pods if pod.group == group.name], autoscales=autoscales
            )
        ]
        if operations:
            found.append(Resize(cluster, operations))
    return found


def _operations(
    number: int, group: WorkerGroup, size: GroupSize, pods: Sequence[str], *, autoscales: bool
) -> list[dict[str, Any]]:
    """The operations for one group; none if it has the right size."""
    desired: dict[str, Any] = {"minReplicas": size.min, "maxReplicas": size.max}
    current: dict[str, Any] = {"minReplicas": group.min, "maxReplicas": group.max}
    if not autoscales or size.min == size.max:
        desired, current = desired | {"replicas": size.min}, current | {"replicas": group.replicas}
    to_delete, listed = _to_delete(group, size, pods) if not autoscales else ([], [])
    if to_delete != listed:
        desired |= {"scaleStrategy": {"workersToDelete": to_delete}}
    if desired == current:
        return []
    path = f"/spec/workerGroupSpecs/{number}"
    guard = {"op": "test", "path": f"{path}/groupName", "value": group.name}
    return [guard, *({"op": "add", "path": f"{path}/{name}", "value": value} for name, value in desired.items())]


def _to_delete(group: WorkerGroup, size: GroupSize, pods: Sequence[str]) -> tuple[list[str], list[str]]:
    """The pods that KubeRay has to delete, and those that the group lists now.

    KubeRay never takes a name off the list, and deletes it again and again: names of deleted pods are removed.
    """
    listed = list(group.to_delete)
    surplus = min(len(pods), group.replicas) - size.min
    if surplus > 0:
        return list(pods[:surplus]), listed
    return [name for name in listed if name in pods], listed
