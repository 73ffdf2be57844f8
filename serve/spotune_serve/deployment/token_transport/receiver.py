"""The gateway's end: one TCP port, which the connections of all replicas reach."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgpack

from spotune_serve.deployment.token_transport.messages import SECRET_BYTES, Destination, unpacked_tokens
from spotune_serve.engine.base import FinishReason, GeneratedToken, TokenChunk

logger = logging.getLogger(__name__)

_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""The loss of a node is noticed after 25 seconds, if Ray does not notice it before."""
_ACCEPTANCE_SECONDS: Final = 20.0


class ConnectionLostError(Exception):
    """The connection that carried a sequence's tokens broke."""


class TokenReceiver:
    """Receives the tokens of many sequences. It belongs to one event loop.

    Args:
        host: IP address to listen on, which the replicas reach.
        acceptance_seconds: time in which a replica must accept a sequence after it was chosen. Without a limit, a
            request to a node that vanished would wait for ever.

    Attributes:
        connections: one for each replica that has sent tokens.
    """

    def __init__(self, host: str, acceptance_seconds: float = _ACCEPTANCE_SECONDS) -> None:
        self._host = host
        self._acceptance_seconds = acceptance_seconds
        self._port = 0
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._numbers = itertools.count()
        self._sequences: dict[int, TokenSequence] = {}
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen on a free port, unless it does so already."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.get_running_loop().create_server(
                    lambda: _Connection(self._secret, self._sequences, self.connections), self._host, 0
                )
                self._port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close the port and all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self.connections):
            connection.abort()

    @contextmanager
    def sequence(self) -> Iterator[tuple[Destination, TokenSequence]]:
        """A new sequence, and where a replica sends its tokens. Those that arrive after the block are dropped."""
        number = next(self._numbers)
        sequence = self._sequences[number] = TokenSequence(self._acceptance_seconds)
        try:
            yield Destination(self._host, self._port, self._secret, number, sequence.expect), sequence
        finally:
            del self._sequences[number]
            sequence.close()


class TokenSequence:
    """The tokens of one sequence that have arrived, and wait for their reader.

    Args:
        acceptance_seconds: see `TokenReceiver`.

    Attributes:
        connection: what they arrive by; None until a replica has accepted the sequence.
    """

    def __init__(self, acceptance_seconds: float) -> None:
        self._acceptance_seconds = acceptance_seconds
        self._deadline: asyncio.TimerHandle | None = None
        self.connection: asyncio.Protocol | None = None
        self._tokens: list[GeneratedToken] = []
        self._finish_reason: FinishReason | None = None
        self._error: BaseException | None = None
        self._arrival: asyncio.Future[None] | None = None

    def expect(self) -> None:
        """A replica was chosen, and must accept the sequence in time."""
        self.close()
        self._deadline = asyncio.get_running_loop().call_later(self._acceptance_seconds, self._fail_if_not_accepted)

    def close(self) -> None:
        """Expect nothing more."""
        if self._deadline is not None:
            self._deadline.cancel()

    def add(self, tokens: list[GeneratedToken], finish_reason: FinishReason | None) -> None:
        """Take tokens that arrived."""
        self._tokens += tokens
        self._finish_reason = finish_reason
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Raise an error to the reader, after the tokens that arrived before. The first error counts."""
        self._error = self._error or error
        self._wake()

    async def read(self) -> TokenChunk:
        """All that arrived since the last call: at least one token, or the finish reason.

        Raises:
            BaseException: the error that `fail` was given.
        """
        while not self._tokens and self._finish_reason is None:
            if self._error is not None:
                raise self._error
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        chunk = TokenChunk(tuple(self._tokens), self._finish_reason)
        self._tokens, self._finish_reason = [], None
        return chunk

    def _fail_if_not_accepted(self) -> None:
        if self.connection is None:
            self.fail(ConnectionLostError(f"the replica did not accept it within {self._acceptance_seconds:g} s"))

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class _Connection(asyncio.Protocol):
    """The connection of one replica."""

    def __init__(self, secret: bytes, sequences: Mapping[int, TokenSequence], connections: set[_Connection]) -> None:
        self._secret = secret
        self._sequences = sequences
        self._connections = connections
        self._greeting: bytes | None = b""
        self._unpacker = msgpack.Unpacker()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        if self._greeting is not None:
            data = self._greet(self._greeting + data)
        self._unpacker.feed(data)
        for number, tokens, finish_reason in self._unpacker:
            sequence = self._sequences.get(number)
            if sequence is not None:  # else its reader has left
                sequence.connection = self
                sequence.add(unpacked_tokens(tokens), finish_reason)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        for sequence in self._sequences.values():
            if sequence.connection is self:
                sequence.fail(ConnectionLostError(f"the connection to the replica was lost: {exc or 'it closed it'}"))

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _greet(self, data: bytes) -> bytes:
        """Check the secret; returns the data behind it."""
        if len(data) < SECRET_BYTES:
            self._greeting = data
            return b""
        self._greeting = None
        if hmac.compare_digest(data[:SECRET_BYTES], self._secret):
            return data[SECRET_BYTES:]
        logger.warning("a connection from %s has a wrong secret", self._transport.get_extra_info("peername"))
        self.abort()
        return b""
