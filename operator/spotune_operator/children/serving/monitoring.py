"""The PodMonitor of a service, for clusters with the Prometheus operator."""

from typing import Any

from spotune_operator.children.ports import METRICS, SERVE
from spotune_operator.children.serving.groups import GATEWAY
from spotune_operator.children.serving.resolved_service import SERVICE_LABEL, ResolvedService


def pod_monitor(resolved: ResolvedService) -> dict[str, Any] | None:
    """The PodMonitor for the metrics of Ray on all pods, and of the gateway; None without a monitoring namespace."""
    if not resolved.monitoring_namespace:
        return None
    # The head names the port of the gateway, too, and nothing listens there.
    component = ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    only_gateway = {"sourceLabels": component, "regex": GATEWAY, "action": "keep"}
    spec = {
        "selector": {"matchLabels": resolved.owner.selector},
        "podTargetLabels": [SERVICE_LABEL],  # the label `spotune_dev_service` of the metrics
        "podMetricsEndpoints": [
            {"port": METRICS.name, "path": "/metrics"},
            {"port": SERVE.name, "path": "/metrics", "relabelings": [only_gateway]},
        ],
    }
    return resolved.owner.child("monitoring.coreos.com/v1", "PodMonitor", "monitoring") | {"spec": spec}
