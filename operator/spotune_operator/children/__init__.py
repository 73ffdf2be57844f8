"""The Kubernetes objects that a job is made of, each by a pure function from the placed job to a manifest."""

from typing import Any

from spotune_operator.children.config import config_map
from spotune_operator.children.monitoring import pod_monitor
from spotune_operator.children.network import network_policy
from spotune_operator.children.raycluster import Replicas, ray_cluster
from spotune_operator.children.resolved_job import PlacedJob
from spotune_operator.children.storage import volume_claim


def build_children(placed: PlacedJob, replicas: Replicas) -> list[dict[str, Any]]:
    """Everything that a job consists of, in the order in which it is applied.

    Args:
        placed: The job.
        replicas: Worker pods wanted now.

    Raises:
        StalledError: A field of the job asks for what cannot be.
    """
    children = [
        volume_claim(placed),
        config_map(placed),
        network_policy(placed),
        ray_cluster(placed, replicas),
        pod_monitor(placed),
    ]
    return [child for child in children if child is not None]
