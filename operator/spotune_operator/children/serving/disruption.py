"""The PodDisruptionBudget of the gateway."""

from typing import Any

from spotune_operator.children.serving.groups import GATEWAY
from spotune_operator.children.serving.resolved_service import ResolvedService


def gateway_disruption_budget(resolved: ResolvedService) -> dict[str, Any] | None:
    """The PodDisruptionBudget that lets a node drain evict one gateway pod at a time; None for a single gateway.

    It has ``minAvailable``, because ``maxUnavailable`` needs a controller with a scale, which a RayCluster is not: the
    disruption controller of Kubernetes would then refuse every eviction. For the same reason a single pod has none: its
    budget could only forbid the drain of its node.

    Replicas have none: the gateway continues the requests of a lost replica at another one, and a budget would hold
    back the eviction from a node with a notice until the machine is gone, without time to finish anything.
    """
    pods = resolved.service.spec.gateway.replicas
    if pods == 1:
        return None
    spec = {
        "minAvailable": pods - 1,
        "selector": {"matchLabels": resolved.owner.pod_selector(GATEWAY)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return resolved.owner.child("policy/v1", "PodDisruptionBudget", GATEWAY) | {"spec": spec}
