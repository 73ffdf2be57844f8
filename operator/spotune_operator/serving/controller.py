"""The controller of ModelServices: caches, a poller, a work queue, and reconcile workers. The manager starts it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from spotune_operator.errors import KubernetesError
from spotune_operator.kube.client import Kube
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.state import JobKey
from spotune_operator.runtime.logs import log_context
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.runtime.queue import WorkQueue
from spotune_operator.serving.caches import ServiceCaches
from spotune_operator.serving.gateway_poller import GatewayPoller
from spotune_operator.serving.reconciler import ServiceReconciler
from spotune_operator.serving.state import ServiceKey
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)


class ServiceController:
    """Reconciles all ModelServices.

    Args:
        kube: The API server.
        jobs: FinetuneJobs and nodes.
        settings: The operator's.
        metrics: Counts reconciles by result.
        clock: Returns Unix time.
    """

    def __init__(
        self,
        kube: Kube,
        jobs: Caches,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.queue: WorkQueue[ServiceKey] = WorkQueue(settings.retry_seconds, settings.retry_max_seconds)
        self.caches = ServiceCaches(kube, settings, self._changed)
        self.poller = GatewayPoller(settings, self._changed, clock)
        self._reconciler = ServiceReconciler(kube, self.caches, jobs, self.poller, settings, clock)
        self._settings = settings
        self._metrics = metrics
        self._reconciling_since: dict[ServiceKey, float] = {}

    def job_changed(self, key: JobKey) -> None:
        """Reconcile the services of a FinetuneJob that changed."""
        for service in self.caches.serving(*key):
            self._changed(service)

    def node_changed(self, name: str) -> None:
        """Reconcile the services with a pod on this node."""
        for service in self.caches.on_node(name):
            self._changed(service)

    def reconciling_since(self) -> Iterable[tuple[ServiceKey, float]]:
        """Services that are being reconciled, with the monotonic time of the start."""
        return self._reconciling_since.items()

    async def run(self, jobs_listed: asyncio.Event) -> None:
        """Reconcile services until cancelled, once all caches are filled; several may run at the same time.

        FinetuneJobs do not wait for the caches of services: an operator without the rights for services still trains.

        Args:
            jobs_listed: Set once the cache has all FinetuneJobs: a service would report missing jobs before.
        """
        await jobs_listed.wait()
        await self.caches.synced()
        while True:
            key = await self.queue.get()
            self._reconciling_since[key] = time.monotonic()
            with log_context(key, "service"):
                await self._reconcile(key)
            self._metrics.pass_seconds.observe(time.monotonic() - self._reconciling_since.pop(key))

    async def _reconcile(self, key: ServiceKey) -> None:
        try:
            requeue_after = await self._reconciler.reconcile(key)
        except KubernetesError as error:
            self._metrics.passes.labels("error").inc()
            logger.warning("reconcile failed: %s; retrying in %.0f s", error, self.queue.failed(key))
        except Exception:  # a bug that one service triggers must not stop the reconciles of all others
            self._metrics.passes.labels("error").inc()
            logger.exception("reconcile failed with a bug of the operator; retrying in %.0f s", self.queue.failed(key))
        else:
            self._metrics.passes.labels("ok").inc()
            self.queue.done(key)
            if requeue_after is not None:
                self.queue.add(key, requeue_after)

    def _changed(self, key: ServiceKey) -> None:
        self.queue.add(key, self._settings.settle_seconds)
