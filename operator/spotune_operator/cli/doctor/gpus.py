"""Nodes with GPUs, and whether their device plugin offers these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from spotune_operator.cli.doctor.check import Check, Hidden, failed, passed, warning
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import GPU_RESOURCE, Provider

_MARKS: Final = {
    "nvidia.com/gpu.present": "true",
    "kubernetes.azure.com/accelerator": "nvidia",
    "cloud.google.com/gke-accelerator": "",
    "karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia",
    "eks.amazonaws.com/instance-gpu-manufacturer": "nvidia",
}
"""Labels by which clouds and NVIDIA's feature discovery mark nodes with GPUs; an empty value stands for any."""
_NODES_SHOWN: Final = 5


def gpus(nodes: Sequence[NodeView] | Hidden, provider: Provider) -> Check:
    """The GPUs that pods can ask for.

    Args:
        nodes: Of the cluster.
        provider: Whose they are.
    """
    if isinstance(nodes, Hidden):
        return warning("gpus", f"nodes cannot be seen: {nodes.reason}")
    offering = [node for node in nodes if node.gpu_allocatable]
    silent = [node for node in nodes if not node.gpu_capacity and _is_marked(node)]
    lost = [node for node in nodes if node.gpu_allocatable < node.gpu_capacity]
    if silent:
        message = f"{_names(silent)} should have GPUs, but offers no {GPU_RESOURCE}: no device plugin runs there"
        return failed("gpus", message, "install NVIDIA's device plugin, and have it tolerate the taints of these nodes")
    if lost:
        count = sum(node.gpu_capacity - node.gpu_allocatable for node in lost)
        message = f"{count} GPU(s) of {_names(lost)} are unhealthy"
        return warning("gpus", message, "restart the device plugin's pod there, or replace the nodes")
    if not offering:
        message = "no node has a GPU now: jobs wait until a node pool grows"
        return warning("gpus", message, "this is as it should be if an autoscaler makes GPU nodes; else add some")
    total = sum(node.gpu_allocatable for node in offering)
    return passed("gpus", f"{total} GPU(s) on {len(offering)} node(s){_on_spot(offering, provider)}")


def _on_spot(nodes: Sequence[NodeView], provider: Provider) -> str:
    if not provider.spot_labels:
        return "; which of them are spot nodes cannot be told"
    spot = [node for node in nodes if any(node.labels.get(label.key) == label.value for label in provider.spot_labels)]
    hint = "" if spot else ": with workers.capacity spot, jobs wait until a spot pool grows"
    return f", {len(spot)} of them spot{hint}"


def _is_marked(node: NodeView) -> bool:
    return any(key in node.labels and value in ("", node.labels[key]) for key, value in _MARKS.items())


def _names(nodes: Iterable[NodeView]) -> str:
    names = [node.name for node in nodes]
    more = f" and {len(names) - _NODES_SHOWN} more" if len(names) > _NODES_SHOWN else ""
    return ", ".join(names[:_NODES_SHOWN]) + more
