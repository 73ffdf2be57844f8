"""Changes the number of workers of a RayCluster that Kueue manages.

Kueue writes into the templates of worker groups: node selectors and tolerations of flavors, its scheduling gate, and
the annotations by which it finds their pods. The list of groups is atomic, so an apply would remove all of it. Once
such a RayCluster exists, only its numbers of workers are patched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotune_operator.kueue.names import QUEUE_LABEL


def is_queued(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is that of a RayCluster in a queue."""
    return manifest["kind"] == "RayCluster" and QUEUE_LABEL in manifest["metadata"]["labels"]


def scale_operations(manifest: Mapping[str, Any], live: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """The JSON patch (RFC 6902) after which the worker groups have the numbers of a manifest; empty if they have.

    Args:
        manifest: The desired RayCluster.
        live: Name and number of workers of each group of the existing one. Other groups stay as they are.
    """
    desired = {group["groupName"]: group for group in manifest["spec"]["workerGroupSpecs"]}
    operations: list[dict[str, Any]] = []
    for index, (name, workers) in enumerate(live):
        group = desired.get(name)
        if group is None:
            continue
        to_delete = group.get("scaleStrategy", {}).get("workersToDelete", [])
        if group["replicas"] == workers and not to_delete:
            continue
        path = f"/spec/workerGroupSpecs/{index}"
        operations += [
            {"op": "test", "path": f"{path}/groupName", "value": name},
            {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": to_delete}},
            {"op": "add", "path": f"{path}/maxReplicas", "value": group["maxReplicas"]},
            {"op": "add", "path": f"{path}/replicas", "value": group["replicas"]},
        ]
    return operations
