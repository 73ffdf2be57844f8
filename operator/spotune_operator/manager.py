"""A running operator: caches, queue, passes, nodes, and the pages that say how it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from spotune_operator.errors import KubernetesError
from spotune_operator.gpu_healing.healer import Healer
from spotune_operator.kube.client import JOBS, Kube, Manifest
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.state import JobKey
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.reconciler import Reconciler
from spotune_operator.runtime.health import Pages
from spotune_operator.runtime.logs import about
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.runtime.queue import WorkQueue
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)

_LONGEST_PASS_SECONDS = 180.0
"""A pass is a few requests of at most half a minute each."""


class Running:
    """All tasks of an operator; an asynchronous context manager.

    Args:
        kube: The API server.
        settings: The operator's.
        clock: Unix time.
        longest_pass_seconds: A pass that takes longer hangs.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        longest_pass_seconds: float = _LONGEST_PASS_SECONDS,
    ) -> None:
        self.metrics = Metrics()
        self.queue: WorkQueue[JobKey] = WorkQueue(settings.retry_seconds, settings.retry_max_seconds)
        self.poller = Poller(settings, self._changed, clock)
        self.caches = Caches(kube, settings, self._changed, self._node_changed)
        self.healer = Healer(kube, self.caches, settings, clock)
        self.reconciler = Reconciler(kube, self.caches, self.poller, settings, self.metrics, clock)
        self._kube = kube
        self._settings = settings
        self._longest_pass_seconds = longest_pass_seconds
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._passes: dict[JobKey, float] = {}
        self._synced = False
        self.pages = Pages(settings, self.sickness, lambda: self._synced, self._metrics_page)

    async def __aenter__(self) -> Self:
        self._kube.count = lambda verb, plural: self.metrics.api_calls.labels(verb, plural).inc()
        await self._stack.enter_async_context(self.pages)
        await self._stack.enter_async_context(self.poller)
        self._stack.push_async_callback(self._end_tasks)
        for reflector in self.caches.reflectors():
            self._run(reflector.run(), f"watch of {reflector.resource.plural}")
        self._run(self._start(), "start")
        self._run(self.healer.run(), "healing of nodes")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_job(self, event: str | None, body: Manifest) -> None:
        """Take in what a watch says of a FinetuneJob."""
        key = body["metadata"]["namespace"], body["metadata"]["name"]
        if event == "DELETED":
            self.caches.forget_job(key)
        else:
            self.caches.put_job(body)
        self._changed(key)

    def sickness(self) -> str:
        """Why the operator should be started anew; empty while it is well."""
        ended = [task.get_name() for task in self._tasks if task.done() and not _went_well(task)]
        if ended:
            return f"{', '.join(ended)} ended"
        now = time.monotonic()
        hung = ["/".join(key) for key, start in self._passes.items() if now - start > self._longest_pass_seconds]
        return f"the pass over {', '.join(hung)} hangs" if hung else ""

    async def _start(self) -> None:
        """Work on jobs once everything about them is known."""
        await self.caches.synced()
        while not self._synced:
            try:
                for namespace in self._settings.namespaces:
                    async for jobs, _ in self._kube.pages(JOBS, namespace, ""):
                        for body in jobs:
                            self.on_job(None, body)
            except KubernetesError as error:
                logger.warning("listing FinetuneJobs: %s", error)
                await asyncio.sleep(self._settings.retry_seconds)
            else:
                self._synced = True
        self.metrics.synced.set(1)
        logger.info("all caches are filled; %d jobs", len(self.caches.keys()))
        for number in range(self._settings.passes):
            self._run(self._work(), f"pass {number}")

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            self._passes[key] = time.monotonic()
            with about(key):
                await self._pass(key)
            self.metrics.pass_seconds.observe(time.monotonic() - self._passes.pop(key))

    async def _pass(self, key: JobKey) -> None:
        try:
            again = await self.reconciler.reconcile(key)
        except KubernetesError as error:
            self.metrics.passes.labels("error").inc()
            logger.warning("%s; once more in %.0f s", error, self.queue.failed(key))
        except Exception:  # a mistake of ours in one job must not end the work on all others
            self.metrics.passes.labels("error").inc()
            logger.exception("the pass failed; once more in %.0f s", self.queue.failed(key))
        else:
            self.queue.done(key)
            if again is not None:
                self.queue.add(key, again)

    def _changed(self, key: JobKey) -> None:
        self.queue.add(key, self._settings.settle_seconds)

    def _node_changed(self, _name: str) -> None:
        self.healer.wake()

    def _metrics_page(self) -> bytes:
        self.metrics.queue_depth.set(len(self.queue))
        self.metrics.count_phases(self.caches.phases())
        return self.metrics.page()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))


def _went_well(task: asyncio.Task[None]) -> bool:
    """Whether a task that has ended was meant to."""
    return not task.cancelled() and task.exception() is None
