"""A real HTTP server on 127.0.0.1 whose answers a test writes: for an API server, or for a supervisor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Asked:
    """A request as the server saw it; `words` is its method and path."""

    words: str
    query: dict[str, str]
    headers: dict[str, str]
    text: str

    @property
    def body(self) -> Any:
        """Its JSON; None for no text."""
        return json.loads(self.text) if self.text else None


@dataclass
class LocalServer:
    """The server.

    Attributes:
        url: Where it listens.
        asked: What it was asked so far.
        answers: What it says next, one each; the last one again and again.
    """

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def says(self, *answers: Answer) -> None:
        """Answer like this from now on."""
        self.answers = list(answers)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with what is next."""
        text = await request.text()
        words = f"{request.method} {request.path}"
        self.asked.append(Asked(words, dict(request.query), dict(request.headers), text))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


def answer(content: Any = None, status: int = 200, **headers: str) -> Answer:
    """Say a JSON value, or a text as it is."""
    text = content if isinstance(content, str) else json.dumps({} if content is None else content)

    async def say(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status, content_type="application/json", headers=headers)

    return say


def refusal(status: int, message: str) -> Answer:
    """Say no, as an API server does."""
    return answer({"kind": "Status", "status": "Failure", "message": message, "code": status}, status)


def stream(*parts: bytes, cut: bool = False, silent: bool = False) -> Answer:
    """Say parts one after the other; then cut the connection, say nothing more for ever, or end."""

    async def say(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        if silent:
            await asyncio.Event().wait()
        if cut:
            assert request.transport is not None
            request.transport.close()
        return response

    return say


async def silence(_: web.Request) -> web.StreamResponse:
    """Say nothing at all."""
    await asyncio.Event().wait()
    raise AssertionError("it is cancelled before")


@asynccontextmanager
async def local_server(*answers: Answer, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[LocalServer]:
    """A server that listens until the block ends, at a port of its own unless one is given."""
    server = LocalServer(answers=list(answers))
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, port, reuse_address=True)
    await site.start()
    server.url = f"http://{host}:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
