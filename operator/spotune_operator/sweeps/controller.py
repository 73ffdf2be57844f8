"""The controller of FinetuneSweeps: caches and reconcile workers. The manager starts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from spotune_operator.kube.client import Kube
from spotune_operator.kube.phase_change import OnPhaseChange, ignore
from spotune_operator.observe.caches import Caches
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.runtime.workers import ReconcileWorkers
from spotune_operator.settings import Settings
from spotune_operator.sweeps.caches import SweepCaches
from spotune_operator.sweeps.reconciler import SweepReconciler


class SweepController:
    """Reconciles all FinetuneSweeps.

    Args:
        kube: The API server.
        jobs: FinetuneJobs.
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
        self.workers = ReconcileWorkers("sweep", settings, metrics)
        self.caches = SweepCaches(kube, settings, self.workers.enqueue)
        self._reconciler = SweepReconciler(kube, self.caches, jobs, settings, metrics, clock, phase_changed)

    async def run(self, jobs_listed: asyncio.Event) -> None:
        """Be one reconcile worker, once all caches are filled, until cancelled.

        FinetuneJobs do not wait for the caches of sweeps: an operator without the rights for sweeps still trains.

        Args:
            jobs_listed: Set once the cache has all FinetuneJobs: a sweep must not take the name of another job.
        """
        await jobs_listed.wait()
        await self.caches.synced()
        await self.workers.run(self._reconciler.reconcile)
