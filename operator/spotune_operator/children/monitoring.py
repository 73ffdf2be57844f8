"""What Prometheus reads of a job's pods, for clusters with the Prometheus operator."""

from typing import Any

from spotune_operator.children.ports import METRICS, PROGRESS
from spotune_operator.children.resolved_job import JOB_LABEL, PlacedJob


def pod_monitor(placed: PlacedJob) -> dict[str, Any] | None:
    """A PodMonitor for training (/metrics of the supervisor) and for Ray; None without a monitoring namespace."""
    if not placed.monitoring_namespace:
        return None
    endpoints = [{"port": port.name, "path": "/metrics"} for port in (PROGRESS, METRICS)]
    spec = {
        "selector": {"matchLabels": placed.selector},
        "podTargetLabels": [JOB_LABEL],  # the label `spotune_dev_job` of its metrics
        "podMetricsEndpoints": endpoints,
    }
    return placed.child("monitoring.coreos.com/v1", "PodMonitor", "monitoring") | {"spec": spec}
