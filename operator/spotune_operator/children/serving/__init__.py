"""The children of a ModelService: one pure function for each, from the resolved service to a manifest."""

from typing import Any

from spotune_operator.children.serving.disruption import gateway_disruption_budget
from spotune_operator.children.serving.http_route import http_route
from spotune_operator.children.serving.ingress import ingress
from spotune_operator.children.serving.monitoring import pod_monitor
from spotune_operator.children.serving.network import gateway_policy, gateway_service, network_policy
from spotune_operator.children.serving.ray_service import ray_service
from spotune_operator.children.serving.resolved_service import ResolvedService


def build_service_children(resolved: ResolvedService) -> list[dict[str, Any]]:
    """The manifests of all children, in the order in which they are applied.

    A suspended service has no RayService, because KubeRay cannot suspend one: it has no such field, and if the field of
    its RayCluster is used, which has an effect from KubeRay 1.6 on, its controller fails for lack of a head pod.

    Raises:
        StalledError: A field of the spec cannot be applied.
    """
    children = [
        network_policy(resolved),
        gateway_policy(resolved),
        gateway_service(resolved),
        gateway_disruption_budget(resolved),
        ray_service(resolved) if not resolved.service.spec.suspend else None,
        ingress(resolved),
        http_route(resolved),
        pod_monitor(resolved),
    ]
    return [child for child in children if child is not None]
