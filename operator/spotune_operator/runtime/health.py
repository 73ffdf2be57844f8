"""The operator's HTTP server for ``/livez``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from spotune_operator.settings import Settings


class HealthServer:
    """Serves probes and metrics from the event loop of the reconciles, so that a blocked loop fails its probes.

    Args:
        settings: Host and port.
        health_problem: Returns why the operator must be restarted; empty while it is healthy.
        ready: Returns whether all caches are filled.
        metrics: Returns the body of ``/metrics``.
    """

    def __init__(
        self,
        settings: Settings,
        health_problem: Callable[[], str],
        ready: Callable[[], bool],
        metrics: Callable[[], bytes],
    ) -> None:
        self._settings = settings
        self._health_problem = health_problem
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
        """The port in use; it differs from the settings if these have 0."""
        assert self._runner is not None, "the server is used within its context"
        port: int = self._runner.addresses[0][1]
        return port

    async def _livez(self, _: web.Request) -> web.Response:
        health_problem = self._health_problem()
        return web.Response(text=f"{health_problem or 'ok'}\n", status=503 if health_problem else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self._ready()
        return web.Response(text="ok\n" if ready else "the caches are not filled yet\n", status=200 if ready else 503)

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
