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

WORKLOAD_ANNOTATION: Final = "kueue.x-k8s.io/workload"
"""Kueue writes it into the pod templates of a RayCluster that it admits."""


def is_held_back(spec: Mapping[str, Any]) -> bool:
    """Whether Kueue holds back a pod, by its ``v1.PodSpec``: the pod has no quota yet."""
    return any(gate["name"] == ELASTIC_GATE for gate in spec.get("schedulingGates") or ())


def cannot_be_admitted(cluster: Mapping[str, Any]) -> bool:
    """Whether Kueue cannot admit a RayCluster again, by its ``spec``: it has to be created anew.

    When Kueue preempts a cluster whose number of workers has changed, it leaves the annotation of an earlier admission
    in the templates, and the next admission fails on it (seen with Kueue 0.17: "conflict for annotations"; the Workload
    is then finished as ``FailedToStart``).
    """
    if not cluster.get("suspend"):
        return False
    templates = (group.get("template") or {} for group in cluster.get("workerGroupSpecs") or ())
    return any(
        WORKLOAD_ANNOTATION in ((template.get("metadata") or {}).get("annotations") or {}) for template in templates
    )
