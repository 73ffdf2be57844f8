"""The gateway's HTTP server: uvicorn on a port of its own, in the event loop of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import TYPE_CHECKING, Final

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp

_BACKLOG: Final = 2048
_BIND_PATIENCE_SECONDS: Final = 30.0
_BIND_RETRY_SECONDS: Final = 0.2


class HttpServer:
    """Serves an ASGI application until it is drained.

    Args:
        host: address to listen on.
        port: TCP port.
        keep_alive_seconds: time after which it closes a connection without a request.
        linger_seconds: time from a drain until it takes no more connections.
    """

    def __init__(self, host: str, port: int, *, keep_alive_seconds: int, linger_seconds: float) -> None:
        self._host = host
        self._port = port
        self._keep_alive_seconds = keep_alive_seconds
        self._linger_seconds = linger_seconds
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
        self._server = _Server(config)
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def drain(self) -> None:
        """Take no more connections once load balancers have noticed, and wait until all requests are answered."""
        if self._server is None or self._running is None:
            return
        await asyncio.sleep(self._linger_seconds)
        self._server.should_exit = True
        await self._running

    async def _listener(self) -> socket.socket:
        deadline = asyncio.get_running_loop().time() + _BIND_PATIENCE_SECONDS
        while True:
            try:
                # It sets SO_REUSEADDR: connections of a killed process would keep the port for a minute.
                return socket.create_server((self._host, self._port), backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(_BIND_RETRY_SECONDS)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Ray."""
        yield
