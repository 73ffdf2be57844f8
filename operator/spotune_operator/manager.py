"""The manager: starts caches, poller, reconcile workers, GPU healer and health server, and supervises them."""

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
from spotune_operator.kube.client import FINETUNE_JOBS, Kube, Manifest
from spotune_operator.notifications.notifier import Notifier
from spotune_operator.notifications.targets import parse_targets
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.reconciler import Reconciler
from spotune_operator.runtime.health import HealthServer
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.runtime.workers import ReconcileWorkers
from spotune_operator.serving.controller import ServiceController
from spotune_operator.settings import Settings
from spotune_operator.sweeps.controller import SweepController

logger = logging.getLogger(__name__)

_MAX_RECONCILE_SECONDS = 180.0
"""A reconcile consists of a few requests of at most 30 s each."""


class Manager:
    """All components of a running operator; an asynchronous context manager.

    Args:
        kube: The API server.
        settings: The operator's.
        clock: Returns Unix time.
        max_reconcile_seconds: A reconcile that takes longer counts as hung.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        max_reconcile_seconds: float = _MAX_RECONCILE_SECONDS,
    ) -> None:
        self.metrics = Metrics()
        self.notifier = Notifier(parse_targets(settings.notifications), self.metrics.count_notifications, clock=clock)
        notify = self.notifier.phase_changed
        self.workers = ReconcileWorkers("job", settings, self.metrics)
        self.poller = Poller(settings, self.workers.enqueue, clock)
        self.caches = Caches(kube, settings, self.workers.enqueue, self._node_changed)
        self.healer = Healer(kube, self.caches, settings, clock)
        self.reconciler = Reconciler(kube, self.caches, self.poller, settings, self.metrics, clock, notify)
        self.services = (
            ServiceController(kube, self.caches, settings, self.metrics, clock, notify) if settings.serving else None
        )
        self.sweeps = SweepController(kube, self.caches, settings, self.metrics, clock, notify)
        self._kube = kube
        self._settings = settings
        self._max_reconcile_seconds = max_reconcile_seconds
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._synced = False
        self._jobs_listed = asyncio.Event()
        self.health_server = HealthServer(settings, self.health_problem, lambda: self._synced, self._exposition)

    async def __aenter__(self) -> Self:
        self._kube.count = lambda verb, plural: self.metrics.api_calls.labels(verb, plural).inc()
        await self._stack.enter_async_context(self.health_server)
        await self._stack.enter_async_context(self.notifier)
        await self._stack.enter_async_context(self.poller)
        if self.services is not None:
            await self._stack.enter_async_context(self.services.poller)
        self._stack.push_async_callback(self._cancel_tasks)
        of_services = self.services.caches.reflectors() if self.services is not None else ()
        for reflector in (*self.caches.reflectors(), *of_services, *self.sweeps.caches.reflectors()):
            self._create_task(reflector.run(), f"watch of {reflector.resource.plural}")
        self._create_task(self._start_workers(), "start of reconcile workers")
        if self.services is not None:
            for number in range(self._settings.max_concurrent_reconciles):
                work = self.services.run(self._jobs_listed)
                self._create_task(work, f"reconcile worker {number} of services")
        self._create_task(self.sweeps.run(self._jobs_listed), "reconcile worker of sweeps")
        self._create_task(self.healer.run(), "GPU healer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_job(self, event: str | None, body: Manifest) -> None:
        """Handle an event of a FinetuneJob.

        Args:
            event: ``ADDED``, ``MODIFIED`` or ``DELETED``; None for an item of a list.
            body: The object.
        """
        key = body["metadata"]["namespace"], body["metadata"]["name"]
        if event == "DELETED":
            self.caches.forget_job(key)
        else:
            self.caches.put_job(body)
        self.workers.enqueue(key)
        if self.services is not None:
            self.services.job_changed(key)

    def health_problem(self) -> str:
        """Why the operator must be restarted; empty while it is healthy."""
        failed = [task.get_name() for task in self._tasks if task.done() and not _has_succeeded(task)]
        if failed:
            return f"{', '.join(failed)} ended"
        hung = ["/".join(key) for workers in self._all_workers for key in workers.hung(self._max_reconcile_seconds)]
        return f"the reconcile of {', '.join(hung)} hangs" if hung else ""

    @property
    def _all_workers(self) -> list[ReconcileWorkers]:
        """The workers of jobs and sweeps, and those of services if the operator serves models."""
        return [self.workers, self.sweeps.workers, *([self.services.workers] if self.services is not None else ())]

    async def _start_workers(self) -> None:
        """Start the reconcile workers once all caches are filled."""
        await self.caches.synced()
        while not self._synced:
            try:
                for namespace in self._settings.namespaces:
                    async for jobs, _ in self._kube.pages(FINETUNE_JOBS, namespace, ""):
                        for body in jobs:
                            self.on_job(None, body)
            except KubernetesError as error:
                logger.warning("listing FinetuneJobs failed: %s", error)
                await asyncio.sleep(self._settings.retry_seconds)
            else:
                self._synced = True
                self._jobs_listed.set()
        self.metrics.synced.set(1)
        logger.info("all caches are filled; %d jobs", len(self.caches.keys()))
        for number in range(self._settings.max_concurrent_reconciles):
            self._create_task(self.workers.run(self.reconciler.reconcile), f"reconcile worker {number}")

    def _node_changed(self, name: str) -> None:
        self.healer.wake()
        if self.services is not None:
            self.services.node_changed(name)

    def _exposition(self) -> bytes:
        self.metrics.queue_depth.set(sum(len(workers) for workers in self._all_workers))
        self.metrics.count_phases(self.caches.phases())
        return self.metrics.exposition()

    def _create_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))


def _has_succeeded(task: asyncio.Task[None]) -> bool:
    """Whether a finished task returned normally."""
    return not task.cancelled() and task.exception() is None
