"""The gateway's HTTP server: its port, and its drain."""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from spotune_serve.deployment.http_server import HttpServer
from spotune_serve.deployment.local import free_port

pytestmark = pytest.mark.anyio
PATIENCE_SECONDS = 60.0
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def closed(port: int) -> None:
    """Wait until connections to a port are refused, or reset: one that waited to be accepted when the port closed."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except (ConnectionRefusedError, ConnectionResetError):
            return
        writer.close()
        await writer.wait_closed()


def accepted_at(port: int) -> list[socket.socket]:
    """Copies of this process's sockets of the connections that a port has accepted."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        if entry.exists() and str(entry.readlink()).startswith("socket:"):
            each = socket.socket(fileno=os.dup(int(entry.name)))
            name = each.getsockname()
            is_listener = bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            if each.family == socket.AF_INET and name[1] == port and not is_listener:
                found.append(each)
            else:
                each.close()
    return found


def server_at(port: int, linger_seconds: float = 0.0, *, shares_port: bool = False) -> HttpServer:
    return HttpServer("127.0.0.1", port, keep_alive_seconds=5, linger_seconds=linger_seconds, shares_port=shares_port)


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


class Named:
    """An application whose answer is its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers = 0

    async def __call__(self, _scope: dict[str, Any], _receive: object, send: Send) -> None:
        self.answers += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode()})


def ask(port: int) -> str:
    """The answer on a new connection."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as response:
        answer: str = response.read().decode()
    return answer


async def test_a_drain_answers_running_requests_and_takes_no_others() -> None:
    port, app = free_port("127.0.0.1"), Slow()
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


async def test_tokens_do_not_wait_until_earlier_ones_are_acknowledged() -> None:
    port, app = free_port("127.0.0.1"), Slow()
    server = server_at(port)
    await server.start(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        running = asyncio.create_task(client.get("/"))
        await app.begun.wait()
        accepted = accepted_at(port)
        assert accepted
        for connection in accepted:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            connection.close()
        app.finish.set()
        await running
    await server.drain()


async def test_connections_are_taken_until_load_balancers_have_noticed_the_drain() -> None:
    port, app = free_port("127.0.0.1"), Slow()
    app.finish.set()
    server = server_at(port, linger_seconds=PATIENCE_SECONDS)
    await server.start(app)  # type: ignore[arg-type]
    drain = asyncio.create_task(server.drain())
    await asyncio.sleep(0)
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "whole"
    assert not drain.done()
    drain.cancel()
    server._linger_seconds = 0.0
    await server.drain()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_port_with_connections_of_a_former_process_can_be_taken_at_once() -> None:
    """A killed process leaves connections that wait a minute for late packets."""
    port, app = free_port("127.0.0.1"), Slow()
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
    await server_at(free_port("127.0.0.1")).drain()


async def test_a_drain_answers_connections_that_have_not_sent_their_request() -> None:
    """Some wait to be accepted when the drain begins, as the event loop has not run since they came."""
    port, app = free_port("127.0.0.1"), Named("only")
    server = server_at(port)
    await server.start(app)  # type: ignore[arg-type]
    await asyncio.sleep(0.2)  # it listens
    connections = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(20)]
    drain = asyncio.create_task(server.drain())
    await asyncio.sleep(0.4)  # the port is closed
    answers = []
    for connection in connections:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        with connection, connection.makefile("rb") as file:
            answers.append(await asyncio.to_thread(file.read))
    assert [answer for answer in answers if b"only" not in answer] == []
    await drain


async def test_a_drain_does_not_wait_for_a_connection_that_stays_silent() -> None:
    server = server_at(port := free_port("127.0.0.1"))
    await server.start(Named("only"))  # type: ignore[arg-type]
    await asyncio.sleep(0.2)
    with socket.create_connection(("127.0.0.1", port)):
        await asyncio.wait_for(server.drain(), PATIENCE_SECONDS)


async def test_servers_share_a_port_and_one_may_leave_it_while_requests_arrive() -> None:
    port, apps = free_port("127.0.0.1"), [Named("first"), Named("second")]
    servers = [server_at(port, shares_port=True) for _ in apps]
    for server, app in zip(servers, apps, strict=True):
        await server.start(app)  # type: ignore[arg-type]
    await asyncio.sleep(0.2)
    while not all(app.answers for app in apps):
        await asyncio.to_thread(ask, port)

    def ask_often() -> list[str]:
        return [ask(port) for _ in range(40)]

    asking = asyncio.gather(*(asyncio.to_thread(ask_often) for _ in range(4)))
    await servers[0].drain()
    assert {answer for answers in await asking for answer in answers} <= {"first", "second"}
    answered = apps[0].answers
    assert [await asyncio.to_thread(ask, port) for _ in range(20)] == ["second"] * 20
    assert apps[0].answers == answered
    await servers[1].drain()


async def test_a_server_shares_its_port_with_no_other_unless_it_is_told_to() -> None:
    port = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port), reuse_port=True):
        starting = asyncio.create_task(server_at(port).start(Named("only")))  # type: ignore[arg-type]
        await asyncio.sleep(0.3)
        assert not starting.done()
        starting.cancel()
