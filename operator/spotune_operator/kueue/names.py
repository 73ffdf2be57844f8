"""Names of Kueue's API that jobs use.

Sources: Kueue's "Run A RayCluster", "Elastic Workloads", "Run Jobs With Workload Priority".
"""

from collections.abc import Mapping
from typing import Any, Final

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""The LocalQueue of a RayCluster."""
PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"
"""The WorkloadPriorityClass of a RayCluster."""
ELASTIC_ANNOTATION: Final = "kueue.x-k8s.io/elastic-job"
ELASTIC_GATE: Final = "kueue.x-k8s.io/elastic-job"
"""Kueue's scheduling gate. It removes it from the pods of an elastic job that have quota."""


def is_held_back(spec: Mapping[str, Any]) -> bool:
    """Whether Kueue holds back a pod, by its ``v1.PodSpec``: the pod has no quota yet."""
    return any(gate["name"] == ELASTIC_GATE for gate in spec.get("schedulingGates") or ())
