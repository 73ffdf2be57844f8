"""Unfit nodes, which the trainer has named: new worker pods go elsewhere, and those that are left there are deleted.

Worker templates get a node affinity against them. KubeRay creates new pods from it and leaves running ones alone, and
the hash of the pinned template does not change, so no pod counts as outdated. A job in a queue keeps its templates:
Kueue would suspend and queue it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from spotune.custom_resource import Condition
from spotune.job import FinetuneJobStatus, StragglerStatus, UnfitNodeStatus
from spotune.units.timestamps import rfc3339
from spotune_operator.kube.conditions import Finding, find
from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.state import Pod
from spotune_operator.observe.supervisor_status import ProgressResponse

NODES_FIT: Final = "NodesFit"


def node_fields(progress: ProgressResponse, previous: FinetuneJobStatus) -> dict[str, Any]:
    """The status of unfit nodes and of stragglers; without news of the former, they stay."""
    unfit = previous.unfit_nodes
    if progress.unfit_nodes is not None:
        unfit = [
            UnfitNodeStatus(node=each.node, reason=each.reason, since=rfc3339(each.since), boot=each.boot)
            for each in progress.unfit_nodes
        ]
    slow = [
        StragglerStatus(rank=each.rank, node=each.node, ratio=round(each.ratio, 2), since=rfc3339(each.since))
        for each in progress.stragglers or ()
    ]
    return {"unfit_nodes": unfit, "stragglers": slow}


def excluded(unfit: Iterable[UnfitNodeStatus], nodes: Mapping[str, NodeView]) -> list[str]:
    """Names of the unfit nodes that exist and have not been booted since.

    Args:
        unfit: Of the status.
        nodes: All of them that exist, by name.
    """
    found = ((each, nodes.get(each.node)) for each in unfit)
    return sorted(each.node for each, node in found if node is not None and _is_same_boot(each, node))


def _is_same_boot(unfit: UnfitNodeStatus, node: NodeView) -> bool:
    return not unfit.boot or not node.boot or unfit.boot == node.boot


def without_nodes(cluster: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The manifest of a RayCluster whose new worker pods avoid these nodes."""
    if not names:
        return dict(cluster)
    spec = cluster["spec"]
    groups = [group | {"template": _avoiding(group["template"], names)} for group in spec["workerGroupSpecs"]]
    return {**cluster, "spec": {**spec, "workerGroupSpecs": groups}}


def _avoiding(template: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A pod template with an affinity. Its terms are alternatives, so each of them has to exclude the nodes."""
    pod = template["spec"]
    affinity = pod.get("affinity") or {}
    of_nodes = affinity.get("nodeAffinity") or {}
    required = of_nodes.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    # A requirement on fields has one value. The label kubernetes.io/hostname may differ from the name of the node.
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]
    terms = required.get("nodeSelectorTerms") or [{}]
    required = {
        "nodeSelectorTerms": [term | {"matchFields": [*term.get("matchFields", ()), *others]} for term in terms]
    }
    of_nodes = of_nodes | {"requiredDuringSchedulingIgnoredDuringExecution": required}
    return {**template, "spec": {**pod, "affinity": {**affinity, "nodeAffinity": of_nodes}}}


def pods_to_replace(workers: Iterable[Pod], excluded_names: Iterable[str], progress: ProgressResponse) -> list[Pod]:
    """Workers on excluded nodes on which no rank runs any more.

    Args:
        workers: The worker pods.
        excluded_names: The nodes that the RayCluster avoids already, so that KubeRay replaces the pods elsewhere.
        progress: Of the trainer; knows where ranks run.
    """
    if progress.unfit_nodes is None:  # the operator or the head has just started, and ranks may run anywhere
        return []
    in_use = {each.node for each in progress.unfit_nodes if each.in_use}
    names = set(excluded_names) - in_use
    return [pod for pod in workers if pod.node in names]


def nodes_fit_findings(unfit: Sequence[UnfitNodeStatus], conditions: Sequence[Condition]) -> list[Finding]:
    """The condition about unfit nodes; none while a job has never had any.

    Args:
        unfit: Of the new status.
        conditions: Of the last one.
    """
    if unfit:
        message = "; ".join(f"{each.node}: {each.reason}" for each in unfit)
        return [Finding(NODES_FIT, "False", "UnfitNodes", f"left out until they are booted again: {message}")]
    if find(conditions, NODES_FIT) is not None:
        return [Finding(NODES_FIT, "True", "Fit", "no node is left out")]
    return []
