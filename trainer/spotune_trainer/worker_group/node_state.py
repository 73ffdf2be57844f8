"""What an agent tells about its node and the ranks there, and what it is told about other nodes."""

from __future__ import annotations

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
class NodeAddresses:
    """Where the agents of a worker group listen, and those of nodes without ranks: the same for all of its nodes.

    Attributes:
        hosts: the agents of the group's nodes, in the order of their ranks; None: its memory cannot be reached.
        idle: those of nodes without ranks, which may have some since an earlier group.
    """

    hosts: tuple[PeerAddress | None, ...]
    idle: tuple[PeerAddress | None, ...] = ()

    def others_of(self, node: int) -> OtherNodes:
        """The other nodes, as the group's node of this number sees them: a ring, in which each has a next one."""
        around = (*self.hosts[node + 1 :], *self.hosts[:node])
        following = [peer for peer in around if peer is not None]
        after = following[0] if self.hosts[node] is not None and following else None
        return OtherNodes((*following, *(peer for peer in self.idle if peer is not None)), after)


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
