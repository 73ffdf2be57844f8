"""The worker groups of a service's Ray cluster, and how many pods each has."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spotune.custom_resource.object_names import GATEWAY as GATEWAY
from spotune.custom_resource.object_names import REPLICAS as REPLICAS
from spotune.service import ReplicasSpec
from spotune_operator.children.serving.resolved_service import ResolvedService
from spotune_operator.providers import Capacity


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
    gateways = resolved.service.spec.gateway.replicas
    return [GroupSize(GATEWAY, "on-demand", gateways, gateways), *_replicas(resolved)]


def replicas_at(replicas: ReplicasSpec, percent: int) -> ReplicasSpec:
    """The replicas of a version that gets this percentage of the requests; one at least, unless it scales to zero."""
    share = {
        "min": math.ceil(replicas.min * percent / 100),
        "max": max(math.ceil(replicas.max * percent / 100), 1),
    }
    return replicas.model_copy(update=share)


def min_replicas(resolved: ResolvedService) -> int:
    """Minimum number of replica pods: each version has its own."""
    return sum(version.replicas.min for version in resolved.versions)


def _replicas(resolved: ResolvedService) -> Iterator[GroupSize]:
    """The groups with replicas. With mixed capacity both groups always exist, so scaling never changes their number."""
    spec, minimum = resolved.service.spec, min_replicas(resolved)
    maximum = sum(version.replicas.max for version in resolved.versions)
    if spec.capacity != "mixed":
        yield GroupSize(spec.capacity, spec.capacity, minimum, maximum)
        return
    base = spec.on_demand_base
    yield GroupSize("on-demand", "on-demand", min(base, minimum), base)
    yield GroupSize("spot", "spot", max(minimum - base, 0), maximum - base)
