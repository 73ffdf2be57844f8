"""The gateway's HTTP server: its port, and its drain."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from spotune_serve.deployment.http_server import HttpServer

pytestmark = pytest.mark.anyio
PATIENCE_SECONDS = 60.0
Send = Callable[[dict[str, Any]], Awaitable[None]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


async def closed(port: int) -> None:
    """Wait until connections to a port are refused, or reset: one that waited to be accepted when the port closed."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except (ConnectionRefusedError, ConnectionResetError):
            return
        writer.close()
        await writer.wait_closed()


def server_at(port: int, linger_seconds: float = 0.0) -> HttpServer:
    return HttpServer("127.0.0.1", port, keep_alive_seconds=5, linger_seconds=linger_seconds)


class Slow:
    """An application whose answers wait."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.finish = asyncio.Event()

    async def __call__(self, _scope: dict[str, Any], _receive: object, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.begun.set()
        await self.finish.wait()
        await send({"type": "http.response.body", "body": b"whole"})


async def test_a_drain_answers_running_requests_and_takes_no_others() -> None:
    port, app = free_port(), Slow()
    server = server_at(port)
    await server.start(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        running = asyncio.create_task(client.get("/"))
        await app.begun.wait()
        drain = asyncio.create_task(server.drain())
        await asyncio.wait_for(closed(port), PATIENCE_SECONDS)
        assert not drain.done()
        app.finish.set()
        assert (await running).text == "whole"
        await drain


async def test_connections_are_taken_until_load_balancers_have_noticed_the_drain() -> None:
    port, app = free_port(), Slow()
    app.finish.set()
    server = server_at(port, linger_seconds=0.5)
    await server.start(app)  # type: ignore[arg-type]
    drain = asyncio.create_task(server.drain())
    await asyncio.sleep(0)
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "whole"
    await drain


async def test_a_port_with_connections_of_a_former_process_can_be_taken_at_once() -> None:
    """A killed process leaves connections that wait a minute for late packets."""
    port, app = free_port(), Slow()
    app.finish.set()
    first = server_at(port)
    await first.start(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await client.get("/", headers={"connection": "close"})  # the server closes first, and its end waits
    await first.drain()
    second = server_at(port)
    await second.start(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/")).text == "whole"
    await second.drain()


async def test_a_port_that_another_process_is_about_to_leave_is_waited_for() -> None:
    app = Slow()
    app.finish.set()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = server_at(port)
        starting = asyncio.create_task(server.start(app))  # type: ignore[arg-type]
        await asyncio.sleep(0.3)
        assert not starting.done()
    await starting
    await server.drain()


async def test_a_server_that_never_started_drains_at_once() -> None:
    await server_at(free_port()).drain()
