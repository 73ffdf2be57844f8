"""A real HTTP server on 127.0.0.1 with scripted responses: an API server, or a supervisor."""

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
class RecordedRequest:
    """A received request; `words` is its method and path."""

    words: str
    query: dict[str, str]
    headers: dict[str, str]
    text: str

    @property
    def body(self) -> Any:
        """Its JSON body; None without one."""
        return json.loads(self.text) if self.text else None


@dataclass
class LocalServer:
    """The server.

    Attributes:
        url: Its base URL.
        asked: The requests so far.
        answers: The next responses, one for each request; the last one is repeated.
    """

    url: str = ""
    asked: list[RecordedRequest] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def respond_with(self, *answers: Answer) -> None:
        """Respond like this from now on."""
        self.answers = list(answers)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Respond to a request with the next response."""
        text = await request.text()
        words = f"{request.method} {request.path}"
        self.asked.append(RecordedRequest(words, dict(request.query), dict(request.headers), text))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


def answer(content: Any = None, status: int = 200, **headers: str) -> Answer:
    """Respond with a JSON value, or with a text unchanged."""
    text = content if isinstance(content, str) else json.dumps({} if content is None else content)

    async def say(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status, content_type="application/json", headers=headers)

    return say


def failure(status: int, message: str) -> Answer:
    """Respond with an error of the API server."""
    return answer({"kind": "Status", "status": "Failure", "message": message, "code": status}, status)


def stream(*parts: bytes, cut: bool = False, silent: bool = False) -> Answer:
    """Send parts one after the other; then cut the connection, stay silent, or end."""

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
    """Never respond."""
    await asyncio.Event().wait()
    raise AssertionError("it is cancelled before")


@asynccontextmanager
async def local_server(*answers: Answer, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[LocalServer]:
    """A server that listens until the block ends, on a free port unless one is given."""
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
