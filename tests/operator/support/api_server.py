"""A minimal API server for an operator: lists, watches without events, and applies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import kopf
from aiohttp import web

from spotune_operator.kube.client import Kube
from tests.operator.support.local_server import LocalServer, local_server

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ApiServer:
    """The server.

    Attributes:
        objects: Objects in lists, by plural.
        named: The object, or None if there is none, that the GET of any one name returns, by plural.
        instead: Handlers that replace the default, by method and plural, such as "GET rayclusters".
        server: The HTTP server with its requests.
    """

    objects: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    named: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    instead: dict[str, Handler] = field(default_factory=dict)
    server: LocalServer = field(default_factory=LocalServer)

    def asked(self, method: str) -> list[str]:
        """Paths of the requests of a method."""
        return [
            words for asked in self.server.asked for verb, _, words in [asked.words.partition(" ")] if verb == method
        ]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        _, root, *parts = request.path.split("/")
        rest = parts[1:] if root == "api" else parts[2:]
        plural, *name = rest[2:] if rest[0] == "namespaces" else rest
        other = self.instead.get(f"{request.method} {plural}")
        if other is not None:
            return await other(request)
        if request.method == "GET" and "watch" in request.query:
            return await _watch_without_events(request)
        if request.method == "GET" and name:
            found = self.named.get(plural)
            return web.json_response(found) if found is not None else web.json_response({}, status=404)
        if request.method == "GET":
            items = self.objects.get(plural, [])
            return web.json_response({"items": items, "metadata": {"resourceVersion": "7"}})
        body = json.loads(await request.text())
        if name and "status" in name:
            (stored,) = [item for item in self.objects[plural] if item["metadata"]["name"] == name[0]]
            version = stored["metadata"].get("resourceVersion", "1")
            if body["metadata"].get("resourceVersion", version) != version:
                return web.json_response({"message": "the object has been modified"}, status=409)
            stored["metadata"]["resourceVersion"] = str(int(version) + 1)
            stored["status"] = {**stored.get("status", {}), **body["status"]}
            return web.json_response(stored)
        body["metadata"] |= {"uid": f"uid-of-{plural}", "resourceVersion": "8"}
        return web.json_response(body)


async def _watch_without_events(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.Event().wait()
    return response


@asynccontextmanager
async def api_server() -> AsyncIterator[tuple[ApiServer, Kube]]:
    """The server, and a client of it."""
    found = ApiServer()
    async with local_server(found.answer) as found.server, Kube(_login(found.server)) as kube:
        yield found, kube


def _login(server: LocalServer) -> Callable[[], kopf.ConnectionInfo]:
    return lambda: kopf.ConnectionInfo(server=server.url)
