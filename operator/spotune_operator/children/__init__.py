"""The children of a job: one pure function for each, from the resolved job to a manifest."""

from typing import Any

from spotune_operator.children.config import config_map
from spotune_operator.children.model_service import model_service
from spotune_operator.children.monitoring import pod_monitor
from spotune_operator.children.network import network_policy
from spotune_operator.children.raycluster import Replicas, ray_cluster
from spotune_operator.children.resolved_job import ResolvedJob
from spotune_operator.children.storage import volume_claim


def build_children(resolved: ResolvedJob, replicas: Replicas) -> list[dict[str, Any]]:
    """The manifests of all children, in the order in which they are applied.

    Args:
        resolved: The job.
        replicas: The desired number of worker pods.

    Raises:
        StalledError: A field of the spec cannot be applied.
    """
    children = [
        volume_claim(resolved),
        config_map(resolved),
        network_policy(resolved),
        ray_cluster(resolved, replicas),
        pod_monitor(resolved),
        model_service(resolved),
    ]
    return [child for child in children if child is not None]
