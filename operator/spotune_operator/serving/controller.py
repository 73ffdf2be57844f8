"""The controller of ModelServices: caches, a poller and reconcile workers. The manager starts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from spotune_operator.kube.client import Kube
from spotune_operator.kube.phase_change import OnPhaseChange, ignore
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.state import JobKey
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.runtime.workers import ReconcileWorkers
from spotune_operator.serving.caches import ServiceCaches
from spotune_operator.serving.gateway_poller import GatewayPoller
from spotune_operator.serving.reconciler import ServiceReconciler
from spotune_operator.settings import Settings


class ServiceController:
    """Reconciles all ModelServices.

    Args:
        kube: The API server.
        jobs: FinetuneJobs and nodes.
        settings: The operator's.
        metrics: Counts reconciles by result.
        clock: Returns Unix time.
        phase_changed: Called after a status with another phase was written.
    """

    def __init__(
        self,
        kube: Kube,
        jobs: Caches,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        phase_changed: OnPhaseChange = ignore,
    ) -> None:
        self.workers = ReconcileWorkers("service", settings, metrics)
        self.caches = ServiceCaches(kube, settings, self.workers.enqueue)
        self.poller = GatewayPoller(settings, self.workers.enqueue, clock)
        self._reconciler = ServiceReconciler(
            kube, self.caches, jobs, self.poller, settings, metrics, clock, phase_changed
        )

    def job_changed(self, key: JobKey) -> None:
        """Reconcile the services of a FinetuneJob that changed."""
        for service in self.caches.serving(*key):
            self.workers.enqueue(service)

    def node_changed(self, name: str) -> None:
        """Reconcile the services with a pod on this node."""
        for service in self.caches.on_node(name):
            self.workers.enqueue(service)

    async def run(self, jobs_listed: asyncio.Event) -> None:
        """Be one reconcile worker, once all caches are filled, until cancelled; several may run at the same time.

        FinetuneJobs do not wait for the caches of services: an operator without the rights for services still trains.

        Args:
            jobs_listed: Set once the cache has all FinetuneJobs: a service would report missing jobs before.
        """
        await jobs_listed.wait()
        await self.caches.synced()
        await self.workers.run(self._reconciler.reconcile)
