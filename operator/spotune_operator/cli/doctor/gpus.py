"""Checks that the device plugin offers the GPUs of the nodes to pods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from spotune_operator.cli.doctor.check import Check, Forbidden, failed, passed, warning
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import GPU_RESOURCE, Provider

_GPU_LABELS: Final = {
    "nvidia.com/gpu.present": "true",
    "kubernetes.azure.com/accelerator": "nvidia",
    "cloud.google.com/gke-accelerator": "",
    "karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia",
    "eks.amazonaws.com/instance-gpu-manufacturer": "nvidia",
}
"""Labels that clouds and NVIDIA's GPU feature discovery set on GPU nodes; an empty value matches any value."""
_NODES_SHOWN: Final = 5


def gpus(nodes: Sequence[NodeView] | Forbidden, provider: Provider) -> Check:
    """The GPUs that pods can request.

    Args:
        nodes: Nodes of the cluster.
        provider: Cloud provider of the nodes.
    """
    if isinstance(nodes, Forbidden):
        return warning("gpus", f"cannot list nodes: {nodes.reason}")
    offering = [node for node in nodes if node.gpu_allocatable]
    without_plugin = [node for node in nodes if not node.gpu_capacity and _is_labelled(node)]
    lost = [node for node in nodes if node.gpu_allocatable < node.gpu_capacity]
    if without_plugin:
        names = _names(without_plugin)
        message = f"{names} should have GPUs, but no {GPU_RESOURCE} is allocatable: no device plugin runs there"
        return failed("gpus", message, "install NVIDIA's device plugin with tolerations for the taints of these nodes")
    if lost:
        count = sum(node.gpu_capacity - node.gpu_allocatable for node in lost)
        message = f"{count} GPU(s) of {_names(lost)} are unhealthy"
        return warning("gpus", message, "restart the device plugin's pod there, or replace the nodes")
    if not offering:
        message = "no node has a GPU at the moment: jobs wait until a node pool grows"
        return warning("gpus", message, "add GPU nodes, unless an autoscaler creates them on demand")
    total = sum(node.gpu_allocatable for node in offering)
    return passed("gpus", f"{total} GPU(s) on {len(offering)} node(s){_on_spot(offering, provider)}")


def _on_spot(nodes: Sequence[NodeView], provider: Provider) -> str:
    if not provider.spot_labels:
        return "; cannot tell which of them are spot nodes"
    spot = [node for node in nodes if any(node.labels.get(label.key) == label.value for label in provider.spot_labels)]
    hint = "" if spot else ": with workers.capacity spot, jobs wait until a spot pool grows"
    return f", {len(spot)} of them spot{hint}"


def _is_labelled(node: NodeView) -> bool:
    return any(key in node.labels and value in ("", node.labels[key]) for key, value in _GPU_LABELS.items())


def _names(nodes: Iterable[NodeView]) -> str:
    names = [node.name for node in nodes]
    more = f" and {len(names) - _NODES_SHOWN} more" if len(names) > _NODES_SHOWN else ""
    return ", ".join(names[:_NODES_SHOWN]) + more
