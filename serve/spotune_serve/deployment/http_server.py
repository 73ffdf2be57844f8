"""The gateway's HTTP server: uvicorn on a port of its own, in the event loop of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import socket
import struct
from typing import TYPE_CHECKING, Final

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp

_BACKLOG: Final = 2048
_BIND_PATIENCE_SECONDS: Final = 30.0
_BIND_RETRY_SECONDS: Final = 0.2
_SO_ATTACH_FILTER: Final = 26
"""Linux's option, which Python's `socket` does not name."""
_HANDSHAKE_SECONDS: Final = 0.2
_POLL_SECONDS: Final = 0.05
_FIRST_REQUEST_POLLS: Final = 20


class HttpServer:
    """Serves an ASGI application until it is drained.

    Args:
        host: address to listen on.
        port: TCP port.
        keep_alive_seconds: time after which it closes a connection without a request.
        linger_seconds: time from a drain until it takes no more connections.
        shares_port: whether other processes of this user listen on the port, too. The kernel chooses one of them for
            each connection.
    """

    def __init__(
        self, host: str, port: int, *, keep_alive_seconds: int, linger_seconds: float, shares_port: bool = False
    ) -> None:
        self._host = host
        self._port = port
        self._keep_alive_seconds = keep_alive_seconds
        self._linger_seconds = linger_seconds
        self._shares_port = shares_port
        self._server: _Server | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> None:
        """Take connections, unless it does so already. A process that still holds the port gets 30 s to leave it.

        Raises:
            OSError: the port cannot be used.
        """
        if self._server is not None:
            return
        listener = await self._listener()
        config = uvicorn.Config(
            app, lifespan="off", access_log=False, log_config=None, timeout_keep_alive=self._keep_alive_seconds
        )
        self._server = _Server(config, listener)
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def drain(self) -> None:
        """Take no more connections once load balancers have noticed, and wait until all requests are answered."""
        if self._server is None or self._running is None:
            return
        await asyncio.sleep(self._linger_seconds)
        await self._server.leave_port()
        self._server.should_exit = True
        await self._running

    async def _listener(self) -> socket.socket:
        deadline = asyncio.get_running_loop().time() + _BIND_PATIENCE_SECONDS
        while True:
            try:
                # It sets SO_REUSEADDR: connections of a killed process would keep the port for a minute.
                listener = socket.create_server(
                    (self._host, self._port), backlog=_BACKLOG, reuse_port=self._shares_port
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() >= deadline:
                    raise
            else:
                # Tokens must not wait until earlier ones are acknowledged. Connections inherit it; asyncio sets none.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return listener
            await asyncio.sleep(_BIND_RETRY_SECONDS)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    async def leave_port(self) -> None:
        """Take the last connections, close the port, and let each connection send its first request.

        The kernel resets connections that wait to be accepted when their port closes, and uvicorn closes those without
        a request.
        """
        if not self.started:
            return
        _drop_connection_requests(self._listener)
        await asyncio.sleep(_HANDSHAKE_SECONDS)
        for server in self.servers:
            server.close()
        for _ in range(_FIRST_REQUEST_POLLS):
            if not any(getattr(each, "cycle", each) is None for each in self.server_state.connections):
                return
            await asyncio.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Ray."""
        yield


def _drop_connection_requests(listener: socket.socket) -> None:
    """Ignore all SYN packets. The client's kernel repeats them after a second, when other processes have the port.

    Connections that were begun before are still accepted. The filter is a program of the classic Berkeley Packet
    Filter (`SO_ATTACH_FILTER` in socket(7)), which sees a segment from its TCP header on.
    """
    load_flags, skip_unless_syn = (0x30, 0, 0, 13), (0x45, 0, 1, 0x02)
    drop, keep = (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)
    program = b"".join(struct.pack("HBBI", *each) for each in (load_flags, skip_unless_syn, drop, keep))
    memory = ctypes.create_string_buffer(program)
    with contextlib.suppress(OSError):  # kernels of sandboxes may have no filters, and then reset late connections
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(memory)))
