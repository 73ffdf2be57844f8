"""Authenticated TCP connections between nodes, over which they pass the bytes of their segments.

The driver gives the same secret to all agents, which pass it to their ranks. Both sides of a connection prove that they
know it before anything else is read (challenge and response with HMAC-SHA256), so another program on the network can
neither read a copy nor replace one:

    server                            client
      | -- nonce S -------------------> |
      | <-- nonce C, HMAC(S, C) ------- |
      | -- HMAC(C, S) ----------------> |   then messages in turn, each followed by its own HMAC

A message is a JSON object. Its HMAC covers a counter, so none can be repeated. The content of a file follows a message
as it is: it must have the checksum that the message names, and that of the checkpoint's manifest. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import xxhash

from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment

IO_SECONDS: Final = 30.0
"""A connection on which nothing arrives for so long is cut."""
HANDSHAKE_SECONDS: Final = 5.0
"""How long a program that connects may take to prove that it knows the secret."""
CHUNK_BYTES: Final = 1 << 20

_NONCE_BYTES = _MAC_BYTES = 32
_LONGEST_MESSAGE = 16 << 20
_LENGTH = struct.Struct("<I")


class PeerError(Exception):
    """Another node cannot be reached, does not know the secret, or does not send what was asked for."""


class OtherSecretError(PeerError):
    """Another node can be reached, but has another secret: its ranks were started by an earlier driver."""


class _ClosedError(PeerError):
    """The other side closed the connection."""


@dataclass(frozen=True)
class PeerAddress:
    """Where the agent of a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class PeerConnection:
    """One side of an authenticated connection. Not thread-safe. All methods raise `PeerError`.

    Args:
        connected: the socket, which the connection closes.
        secret: that all agents of a driver have.
        serves: whether this side has accepted the connection.
    """

    def __init__(self, connected: socket.socket, secret: bytes, *, serves: bool) -> None:
        self._socket = connected
        self._sent = self._received = 0
        self._serves = serves
        self._key = b""
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.settimeout(HANDSHAKE_SECONDS)
            self._key = self._accept_client(secret) if serves else self._prove_to_server(secret)
            connected.settimeout(IO_SECONDS)
        except OSError as error:
            self.close()
            raise PeerError(f"the connection failed: {error}") from error
        except PeerError:
            self.close()
            raise

    @classmethod
    def open(cls, address: PeerAddress, secret: bytes, connect_seconds: float) -> Self:
        """Connect to the agent of another node."""
        try:
            connected = socket.create_connection((address.host, address.port), connect_seconds)
        except OSError as error:
            raise PeerError(f"{address} cannot be reached: {error}") from error
        return cls(connected, secret, serves=False)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        encoded = json.dumps(message, separators=(",", ":")).encode()
        self._send_all(_LENGTH.pack(len(encoded)) + encoded + self._mac(self._serves, self._sent, encoded))
        self._sent += 1

    def receive(self) -> dict[str, Any]:
        """The next message."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if length > _LONGEST_MESSAGE:
            raise PeerError("a message is too long")
        encoded = self.receive_bytes(length)
        expected = self._mac(not self._serves, self._received, encoded)
        if not hmac.compare_digest(self.receive_bytes(_MAC_BYTES), expected):
            raise PeerError("a message was changed on its way")
        self._received += 1
        value: dict[str, Any] = json.loads(encoded)
        return value

    def send_bytes(self, content: bytes) -> None:
        """Send bytes whose number the other side knows."""
        self._send_all(content)

    def receive_bytes(self, count: int) -> bytes:
        """The next `count` bytes."""
        content = bytearray(count)
        self._receive_into(memoryview(content))
        return bytes(content)

    def send_content(self, segment: Segment, label: Label, before_chunk: Callable[[int], None] | None = None) -> None:
        """Send the content of a segment, which the other side expects to be that of the label.

        Args:
            segment: is read in chunks; a content that changes meanwhile is noticed.
            label: of the content.
            before_chunk: called with the number of bytes sent so far; what it raises ends the connection.
        """
        with segment.open() as content:
            for start in range(0, label.size, CHUNK_BYTES):
                if before_chunk is not None:
                    before_chunk(start)
                if segment.label != label:
                    raise PeerError(f"{label.file} of {label.checkpoint} was replaced while it was sent")
                count = min(CHUNK_BYTES, label.size - start)
                try:
                    sent = self._socket.sendfile(content, LABEL_BYTES + start, count)
                except OSError as error:
                    raise PeerError(f"the connection broke: {error}") from error
                if sent != count:
                    raise PeerError(f"{label.file} of {label.checkpoint} ended early")

    def receive_content(self, segment: Segment, label: Label) -> None:
        """Receive a content into a segment of the label's size, without labelling it.

        Raises:
            PeerError: also if the content does not have the label's checksum.
        """
        digest = xxhash.xxh3_64()
        with memoryview(segment.map()) as mapped, mapped[LABEL_BYTES:] as content:
            for start in range(0, label.size, CHUNK_BYTES):
                with content[start : min(start + CHUNK_BYTES, label.size)] as chunk:
                    self._receive_into(chunk)
                    digest.update(chunk)
        if digest.hexdigest() != label.xxh3:
            raise PeerError(f"{label.file} of {label.checkpoint} arrived with checksum {digest.hexdigest()}")

    def close(self) -> None:
        """Close the connection. The other side's next read fails."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_client(self, secret: bytes) -> bytes:
        """Authenticate the client. Returns the key of this connection's messages."""
        ours = secrets.token_bytes(_NONCE_BYTES)
        self._send_all(ours)
        theirs = self.receive_bytes(_NONCE_BYTES)
        if not hmac.compare_digest(self.receive_bytes(_MAC_BYTES), _digest(secret, b"client", ours, theirs)):
            raise PeerError("a program without the secret of this job connected")
        self._send_all(_digest(secret, b"server", ours, theirs))
        return _digest(secret, b"messages", ours, theirs)

    def _prove_to_server(self, secret: bytes) -> bytes:
        """Authenticate this client, and the server. Returns the key of this connection's messages."""
        theirs = self.receive_bytes(_NONCE_BYTES)
        ours = secrets.token_bytes(_NONCE_BYTES)
        self._send_all(ours + _digest(secret, b"client", theirs, ours))
        proof = b""
        with suppress(_ClosedError):  # by a server to which this client has not proved that it knows the secret
            proof = self.receive_bytes(_MAC_BYTES)
        if not hmac.compare_digest(proof, _digest(secret, b"server", theirs, ours)):
            raise OtherSecretError("the other side does not have the secret of this driver")
        return _digest(secret, b"messages", theirs, ours)

    def _mac(self, from_server: bool, number: int, message: bytes) -> bytes:
        return _digest(self._key, b"server" if from_server else b"client", number.to_bytes(8, "little"), message)

    def _send_all(self, content: bytes) -> None:
        try:
            self._socket.sendall(content)
        except OSError as error:
            raise PeerError(f"the connection broke: {error}") from error

    def _receive_into(self, target: memoryview) -> None:
        received = 0
        while received < len(target):
            try:
                count = self._socket.recv_into(target[received:])
            except OSError as error:
                raise PeerError(f"the connection broke: {error}") from error
            if count == 0:
                raise _ClosedError("the other side closed the connection")
            received += count


def asking(request: str, label: Label, **values: Any) -> dict[str, Any]:
    """A request about one file."""
    return {"request": request, "label": asdict(label), **values}


def _digest(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of parts, each of which has a length that is fixed or comes last."""
    return hmac.digest(key, b"".join(parts), "sha256")
