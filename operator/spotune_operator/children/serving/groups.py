"""The worker groups of a service's Ray cluster, and how many pods each has."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from spotune.service import ModelServiceSpec
from spotune_operator.children.serving.resolved_service import ResolvedService
from spotune_operator.providers import Capacity

GATEWAY: Final = "gateway"
"""Name of the worker group of the gateway, and of its component."""
REPLICAS: Final = "replicas"
"""Component of all pods with replicas; their groups have the names of the capacity types."""


@dataclass(frozen=True)
class GroupSize:
    """How many pods a worker group has: the same number at all times, or as many as Ray's autoscaler chooses.

    Attributes:
        name: Name of the group: ``gateway``, or the capacity type of its replicas.
        capacity: Capacity type of its nodes.
        min: Minimum number of pods, with which the group starts.
        max: Maximum number of pods.
    """

    name: str
    capacity: Capacity
    min: int
    max: int


def group_sizes(resolved: ResolvedService) -> list[GroupSize]:
    """The sizes of all groups, in the order of ``workerGroupSpecs``.

    KubeRay reads them from a RayService only when it creates a RayCluster: a change does not reach a cluster that runs
    (``GenerateHashWithoutReplicasAndWorkersToDelete`` and ``shouldUpdateCluster`` of KubeRay 1.5 and 1.6). To scale a
    service without a new cluster, patch these numbers into its RayCluster, too: ``minReplicas``, ``maxReplicas`` and,
    if Ray's autoscaler does not set it, ``replicas``.
    """
    spec = resolved.service.spec
    gateways = spec.gateway.replicas
    return [GroupSize(GATEWAY, "on-demand", gateways, gateways), *_replicas(spec)]


def _replicas(spec: ModelServiceSpec) -> Iterator[GroupSize]:
    """The groups with replicas. With mixed capacity both groups always exist, so scaling never changes their number."""
    replicas = spec.replicas
    if spec.capacity != "mixed":
        yield GroupSize(spec.capacity, spec.capacity, replicas.min, replicas.max)
        return
    base = spec.on_demand_base
    yield GroupSize("on-demand", "on-demand", min(base, replicas.min), base)
    yield GroupSize("spot", "spot", max(replicas.min - base, 0), replicas.max - base)
