"""The server of a node's agent: keeps copies of another node's files, and passes on what the node has in memory.

Each connection has a thread. A client that has proved that it knows the secret sends requests:

    find, with labels                 -> sizes of the safetensors headers of the files that it holds, then the headers
    read, with a label                -> whether it holds the file, then the content
    keep, with a label, generation    -> why it refuses, or null; then the client sends the content
    and all files of the commit       -> why it was refused after all, or null
    pull                              -> a message, then zeros until the client closes, to measure the network
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from spotune_trainer.checkpoint.memory.node_memory import NodeMemory
from spotune_trainer.checkpoint.memory.peer_connection import (
    CHUNK_BYTES,
    PeerAddress,
    PeerConnection,
    PeerError,
)
from spotune_trainer.checkpoint.memory.peer_copies import PeerCopies, RefusedError
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment

logger = logging.getLogger("spotune.worker")

_MOST_CONNECTIONS = 256
_HEADER_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 256 << 20
_LOWEST_PRIORITY = 19
_MOST_CHUNKS = 1 << 14
_RETRY_SECONDS = 0.1


class PeerServer:
    """Serves the segments of a node to other nodes, in threads of this process.

    Args:
        host: IP address of this node, on which it listens.
        secret: that all agents of a driver have.
        memory: the segments of this node's ranks.
        copies: the copies of another node's files.

    Attributes:
        address: where it listens.
        secret: that a client has to know; may be replaced at any time.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, host: str, secret: bytes, memory: NodeMemory, copies: PeerCopies) -> None:
        self.secret = secret
        self._memory = memory
        self._copies = copies
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MOST_CONNECTIONS)
        self._free_connections = threading.Semaphore(_MOST_CONNECTIONS)
        self._closed = threading.Event()
        self.address = PeerAddress(host, int(self._listener.getsockname()[1]))
        threading.Thread(target=self._accept, name="peer server", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._free_connections.acquire()
            try:
                connected, _ = self._listener.accept()
            except OSError:  # closed, or there are too many open files
                self._free_connections.release()
                self._closed.wait(_RETRY_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connected,), name="peer", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        try:
            with PeerConnection(connected, self.secret, serves=True) as connection:
                while True:
                    self._answer(connection, connection.receive())
        except (PeerError, OSError, KeyError, TypeError, ValueError) as error:
            logger.debug("a connection of another node ended: %s", error)
        finally:
            self._free_connections.release()

    def _answer(self, connection: PeerConnection, message: dict[str, Any]) -> None:
        match message["request"]:
            case "find":
                self._find(connection, [Label(**value) for value in message["labels"]])
            case "read":
                self._read(connection, Label(**message["label"]))
            case "keep":
                self._keep(connection, message["generation"], Label(**message["label"]), message["files"])
            case "pull":
                self._send_zeros(connection)
            case other:
                raise PeerError(f"unknown request {other}")

    def _find(self, connection: PeerConnection, labels: list[Label]) -> None:
        headers = {label.file: _header(segment) for label in labels if (segment := self._holding(label)) is not None}
        found = {file: header for file, header in headers.items() if header}
        connection.send({"sizes": {file: len(header) for file, header in found.items()}})
        for header in found.values():
            connection.send_bytes(header)

    def _read(self, connection: PeerConnection, label: Label) -> None:
        segment = self._holding(label)
        connection.send({"found": segment is not None})
        if segment is not None:
            connection.send_content(segment, label)

    def _keep(self, connection: PeerConnection, generation: int, label: Label, files: list[str]) -> None:
        lower_priority()

        def receive(segment: Segment) -> None:
            connection.send({"refused": None})
            connection.receive_content(segment, label)

        reason = None
        try:
            self._copies.keep(generation, label, files, receive)
        except RefusedError as error:
            reason = str(error)
            logger.info("%s of %s is not copied to this node: %s", label.file, label.checkpoint, reason)
        connection.send({"refused": reason})

    def _send_zeros(self, connection: PeerConnection) -> None:
        connection.send({})
        zeros = bytes(CHUNK_BYTES)
        for _ in range(_MOST_CHUNKS):
            connection.send_bytes(zeros)

    def _holding(self, label: Label) -> Segment | None:
        """A segment of this node that holds a file: of its ranks, or a copy."""
        own = (segment for each, segment in self._memory.labelled() if each == label)
        return next(own, None) or self._copies.find(label)


def lower_priority(set_priority: Callable[[int, int, int], None] = os.setpriority) -> None:
    """Give this thread the lowest priority: training needs the processor more (Linux sets it for each thread)."""
    with suppress(OSError):
        set_priority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _header(segment: Segment) -> bytes:
    """What the file begins with, up to its first tensor; empty if it was replaced meanwhile."""
    with segment.open() as content:
        start = os.pread(content.fileno(), _HEADER_LENGTH.size, LABEL_BYTES)
        if len(start) < _HEADER_LENGTH.size:
            return b""
        (length,) = _HEADER_LENGTH.unpack(start)
        if length > min(_LONGEST_HEADER, segment.content_bytes):
            return b""
        return start + os.pread(content.fileno(), length, LABEL_BYTES + len(start))
