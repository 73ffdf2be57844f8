"""Reads files of a checkpoint from the memory of other nodes, into segments of this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from spotune.plan.devices import free_memory_bytes
from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress, PeerConnection, PeerError, asking
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment
from spotune_trainer.checkpoint.memory.spare_memory import shortage

logger = logging.getLogger("spotune.worker")

_CONNECT_SECONDS = 2.0
"""A node that was just lost does not answer at all."""
_CONNECTIONS = 16


@dataclass(frozen=True)
class PeerFile:
    """A file that another node has in memory.

    Attributes:
        label: of the file.
        holder: the node.
        header: what the file begins with, up to its first tensor. Not verified.
    """

    label: Label
    holder: PeerAddress
    header: bytes = field(repr=False)


@dataclass(frozen=True)
class PeerReader:
    """Access of a rank to the memory of other nodes.

    Attributes:
        peers: the agents of the other nodes, in the order in which they are preferred.
        secret: that all agents of the driver have.
        ranks: number of ranks on this node, which share its free memory.
        free_bytes: returns the free memory of this node.
    """

    peers: tuple[PeerAddress, ...]
    secret: bytes = field(repr=False)
    ranks: int = 1
    free_bytes: Callable[[], int] = free_memory_bytes

    def find(self, labels: Sequence[Label]) -> dict[str, list[PeerFile]]:
        """Who holds these files, by the name of the file. Nodes that do not answer hold nothing."""
        found: dict[str, list[PeerFile]] = {}
        if not labels or not self.peers:
            return found
        with ThreadPoolExecutor(min(_CONNECTIONS, len(self.peers)), thread_name_prefix="find") as threads:
            for each in threads.map(lambda peer: self._find_at(peer, labels), self.peers):
                for file in each:
                    found.setdefault(file.label.file, []).append(file)
        return found

    def read(self, file: PeerFile) -> Segment:
        """The file in a new segment, with the checksum of its label.

        Raises:
            PeerError: the other node does not have it any more, the connection broke, or the bytes are others.
            OSError: this node has no memory for it.
        """
        label = file.label
        reason = shortage((LABEL_BYTES + label.size) * self.ranks, self.free_bytes)
        if reason is not None:
            raise OSError(f"{label.file} {reason}")
        segment = Segment.create()
        segment.resize(label.size)
        with PeerConnection.open(file.holder, self.secret, _CONNECT_SECONDS) as connection:
            connection.send(asking("read", label))
            if not connection.receive()["found"]:
                raise PeerError(f"{file.holder} does not have {label.file} any more")
            connection.receive_content(segment, label)
        return segment

    def _find_at(self, peer: PeerAddress, labels: Sequence[Label]) -> list[PeerFile]:
        by_file = {label.file: label for label in labels}
        try:
            with PeerConnection.open(peer, self.secret, _CONNECT_SECONDS) as connection:
                connection.send({"request": "find", "labels": [asdict(label) for label in labels]})
                sizes = connection.receive()["sizes"]
                return [PeerFile(by_file[file], peer, connection.receive_bytes(size)) for file, size in sizes.items()]
        except PeerError as error:
            logger.info("the memory of node %s cannot be read: %s", peer, error)
            return []
