"""The PodMonitor of a job, for clusters with the Prometheus operator."""

from typing import Any

from spotune_operator.children.ports import METRICS, PROGRESS
from spotune_operator.children.resolved_job import JOB_LABEL, ResolvedJob


def pod_monitor(resolved: ResolvedJob) -> dict[str, Any] | None:
    """The PodMonitor for the metrics of the supervisor and of Ray; None without a monitoring namespace."""
    if not resolved.monitoring_namespace:
        return None
    endpoints = [{"port": port.name, "path": "/metrics"} for port in (PROGRESS, METRICS)]
    spec = {
        "selector": {"matchLabels": resolved.selector},
        "podTargetLabels": [JOB_LABEL],  # the label `spotune_dev_job` of its metrics
        "podMetricsEndpoints": endpoints,
    }
    return resolved.child("monitoring.coreos.com/v1", "PodMonitor", "monitoring") | {"spec": spec}
