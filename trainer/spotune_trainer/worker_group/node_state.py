"""What an agent tells about its node and the ranks there, and what it is told about other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress
from spotune_trainer.training.task import RankPlacement, WorkerTask


@dataclass(frozen=True)
class NodeInfo:
    """Address and memory of a node.

    Attributes:
        address: IP address that other nodes reach it by.
        memory_bytes: of the node, or of its container.
        peer: where other agents reach its memory; None: they cannot.
        name: of the node, for people and Kubernetes.
        boot: id that its kernel made when it started; empty if it is not known.
        is_of_cluster: whether Kubernetes has placed the agent there, so that nobody else uses its GPUs.
    """

    address: str
    memory_bytes: int
    peer: PeerAddress | None = None
    name: str = ""
    boot: str = ""
    is_of_cluster: bool = False


@dataclass(frozen=True)
class OtherNodes:
    """The other nodes whose agents run, as one agent sees them.

    Attributes:
        peers: their agents.
        next: the one that keeps copies of this node's commits; None if the group has only one node.
    """

    peers: tuple[PeerAddress, ...] = ()
    next: PeerAddress | None = None


@dataclass(frozen=True)
class NodeGroup:
    """The ranks of one generation on one node.

    Attributes:
        task: of the generation.
        placements: of its ranks on this node.
        has_failed: whether one of them has failed.
    """

    task: WorkerTask
    placements: tuple[RankPlacement, ...]
    has_failed: bool = False


def others_of(hosts: Sequence[PeerAddress | None], idle: Sequence[PeerAddress | None]) -> list[OtherNodes]:
    """The other nodes for each node of a group, in the order of their ranks: a ring, in which each has a next one.

    Args:
        hosts: the agents of the group's nodes; None: its memory cannot be reached.
        idle: those of nodes without ranks, which may have some since an earlier group.
    """
    ring = [host for host in hosts if host is not None]
    found = []
    for host in hosts:
        start = ring.index(host) + 1 if host is not None else 0
        following = [peer for peer in ring[start:] + ring[:start] if peer != host]
        after = following[0] if host is not None and following else None
        found.append(OtherNodes((*following, *(peer for peer in idle if peer is not None)), after))
    return found
