"""Which pools no node matches: a spelling mistake, or nodes that an autoscaler has yet to create."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spotune.job import PoolSpec
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import Provider


def matches(pool: PoolSpec, node: NodeView, provider: Provider) -> bool:
    """Whether a node has the labels of a pool. Taints and free resources are left to the scheduler."""
    has_type = not pool.gpu_type or any(node.labels.get(key) == pool.gpu_type for key in provider.gpu_type_labels)
    has_labels = all(node.labels.get(key) == value for key, value in pool.labels.items())
    return has_type and has_labels and provider.has_capacity(node.labels, pool.capacity)


def unmatched(pools: Sequence[PoolSpec], nodes: Iterable[NodeView], provider: Provider) -> list[PoolSpec]:
    """The pools whose labels no node has now. An autoscaler may still create one, so this is no error."""
    known = list(nodes)
    return [pool for pool in pools if not any(matches(pool, node, provider) for node in known)]


def description(pool: PoolSpec, provider: Provider) -> str:
    """What the nodes of a pool are chosen by, for messages."""
    labels = [f"{key}={value}" for key, value in pool.labels.items()]
    if pool.gpu_type:
        labels.append(f"{' or '.join(provider.gpu_type_labels)}={pool.gpu_type}")
    return ", ".join([pool.capacity, *labels])


def message(pools: Sequence[PoolSpec], provider: Provider) -> str:
    """One sentence about pools that no node matches."""
    named = "; ".join(f"{pool.name} ({description(pool, provider)})" for pool in pools)
    return (
        f"no node matches now: {named}. Check zone, gpuType and nodeSelector, unless an autoscaler creates such nodes"
    )
