"""``/livez``, ``/readyz`` and ``/metrics`` of the operator."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from spotune_operator.settings import Settings


class Pages:
    """Serves from the loop that does the work: a loop that stands still answers no probe.

    Args:
        settings: Where to listen.
        sickness: Why the operator should be started anew; empty while it is well.
        ready: Whether everything is known that decisions need.
        metrics: The text of ``/metrics``.
    """

    def __init__(
        self, settings: Settings, sickness: Callable[[], str], ready: Callable[[], bool], metrics: Callable[[], bytes]
    ) -> None:
        self._settings = settings
        self._sickness = sickness
        self._ready = ready
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_page),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._settings.host, self._settings.port).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def port(self) -> int:
        """Where it listens; another port than the settings' where these leave the choice (0)."""
        assert self._runner is not None, "pages are served within the context"
        port: int = self._runner.addresses[0][1]
        return port

    async def _livez(self, _: web.Request) -> web.Response:
        sickness = self._sickness()
        return web.Response(text=f"{sickness or 'ok'}\n", status=503 if sickness else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self._ready()
        return web.Response(text="ok\n" if ready else "the caches are being filled\n", status=200 if ready else 503)

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
