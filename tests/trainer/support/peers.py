"""Nodes of this machine: each has the memory of an agent, and a server for the other nodes. No rank runs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.layout import newest_complete
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory, RankMemory
from spotune_trainer.checkpoint.memory.peer_copies import PeerCopies
from spotune_trainer.checkpoint.memory.peer_reader import PeerReader
from spotune_trainer.checkpoint.memory.peer_sender import PeerSender
from spotune_trainer.checkpoint.memory.peer_server import PeerServer

SECRET = b"of the driver"
FAST = 1e9
"""Bytes per second."""


@dataclass
class Node:
    """What an agent has in memory. All of the machine's is free, whatever else runs on it."""

    memory: NodeMemory = field(default_factory=NodeMemory)
    copies: PeerCopies = field(default_factory=lambda: PeerCopies(machine_memory_bytes))

    def __post_init__(self) -> None:
        self.server = PeerServer("127.0.0.1", SECRET, self.memory, self.copies)

    def begin(
        self, generation: int, restore: str | None = None, *others: Node, ranks: int = 1, secret: bytes = SECRET
    ) -> list[RankMemory]:
        """Begin a generation; returns the memory of its ranks, which can read that of other nodes."""
        copies = self.copies.begin(generation, restore)
        shared = self.memory.share(ranks, 2, restore, copies, others_are_replaced=bool(others))
        memories = [memory for memory in shared if memory is not None]
        for memory in memories:
            memory.free_bytes = machine_memory_bytes
            addresses = tuple(other.server.address for other in others)
            memory.peers = PeerReader(addresses, secret, ranks, free_bytes=machine_memory_bytes)
        return memories

    def sender(
        self,
        to: Node,
        checkpoints: Path,
        generation: int = 1,
        secret: bytes = SECRET,
        bytes_per_second: float = FAST,
    ) -> PeerSender:
        """Sends this node's commits to another node."""
        complete = partial(newest_complete, checkpoints, generation)
        return PeerSender(self.memory, generation, complete, to.server.address, secret, bytes_per_second)

    def lose(self) -> None:
        """The node is gone."""
        self.server.close()
        self.memory.free()
        self.copies.free()


@contextmanager
def nodes(number: int) -> Iterator[list[Node]]:
    """Several nodes, which are lost in the end."""
    started = [Node() for _ in range(number)]
    try:
        yield started
    finally:
        for node in started:
            node.lose()
