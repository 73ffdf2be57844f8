"""The replica's end: one connection for each gateway."""

from __future__ import annotations

import asyncio
from typing import Any

from spotune_serve.deployment.token_transport.messages import Destination, packed
from spotune_serve.engine.base import TokenChunk


class GatewayLostError(Exception):
    """The gateway cannot be reached, or closed the connection."""


class TokenSender:
    """Sends the tokens of many sequences to their gateways. It belongs to one event loop."""

    def __init__(self) -> None:
        self._connections: dict[tuple[str, int], asyncio.Future[_Connection]] = {}

    async def open(self, destination: Destination) -> SequenceSender:
        """Accept a sequence: tell its gateway, over a new connection if there is none.

        Raises:
            GatewayLostError: the gateway cannot be reached.
        """
        address = (destination.host, destination.port)
        connecting = self._connections.get(address)
        if connecting is None or _is_lost(connecting):
            connecting = asyncio.ensure_future(_connect(destination))
            self._connections[address] = connecting
        try:
            connection = await asyncio.shield(connecting)
        except OSError as error:
            raise GatewayLostError(f"the gateway at {destination.host}:{destination.port}: {error}") from error
        sender = SequenceSender(connection, destination.sequence)
        sender.send(TokenChunk(()))
        return sender


class SequenceSender:
    """Sends the tokens of one sequence."""

    def __init__(self, connection: _Connection, sequence: int) -> None:
        self._connection = connection
        self._sequence = sequence

    def send(self, chunk: TokenChunk) -> None:
        """Send tokens. They leave together with those of other sequences, at the event loop's next turn.

        Raises:
            GatewayLostError: the gateway closed the connection.
        """
        self._connection.write(packed(self._sequence, chunk))


class _Connection(asyncio.Protocol):
    """The connection to one gateway."""

    def __init__(self, secret: bytes) -> None:
        self.lost = False
        self._secret = secret
        self._waiting: list[bytes] = []
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self._secret)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def write(self, data: bytes) -> None:
        if self.lost:
            raise GatewayLostError("the gateway closed the connection")
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._waiting))
        self._waiting.clear()


async def _connect(destination: Destination) -> _Connection:
    loop = asyncio.get_running_loop()
    _transport, connection = await loop.create_connection(
        lambda: _Connection(destination.secret), destination.host, destination.port
    )
    return connection


def _is_lost(connecting: asyncio.Future[_Connection]) -> bool:
    """Whether there is no connection any more, and none is being made."""
    if not connecting.done():
        return False
    return connecting.cancelled() or connecting.exception() is not None or connecting.result().lost
