"""One level-triggered reconcile of one sweep: observe, decide, write the status, execute the decision.

A reconcile may run at any time, run twice, and stop at any point.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from spotune.errors import JobError
from spotune.job_file.load import parse_sweep
from spotune.job_file.yaml_file import Document
from spotune.sweep import FinetuneSweep, FinetuneSweepStatus
from spotune_operator.errors import NotFoundError, RefusedError
from spotune_operator.kube.client import FINETUNE_JOBS, FINETUNE_SWEEPS, Kube
from spotune_operator.kube.phase_change import OnPhaseChange, ignore
from spotune_operator.kube.status_writer import StatusWriter
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.newer_definition import parse_status
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings
from spotune_operator.sweeps.caches import CachedSweep, SweepCaches
from spotune_operator.sweeps.decide import SweepDecision, TrialPatch, decide_sweep, stalled_sweep
from spotune_operator.sweeps.events import sweep_events
from spotune_operator.sweeps.state import ObservedSweep, SweepKey

logger = logging.getLogger(__name__)


class SweepReconciler:
    """Reconciles sweeps.

    Args:
        kube: The API server.
        caches: Sweeps and the jobs of their trials.
        jobs: All FinetuneJobs.
        settings: The operator's.
        metrics: Counts reconciles by result.
        clock: Returns Unix time.
        phase_changed: Called after a status with another phase was written.
    """

    def __init__(
        self,
        kube: Kube,
        caches: SweepCaches,
        jobs: Caches,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        phase_changed: OnPhaseChange = ignore,
    ) -> None:
        self._kube = kube
        self._caches = caches
        self._jobs = jobs
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._status: StatusWriter[CachedSweep, FinetuneSweepStatus] = StatusWriter(
            kube,
            FINETUNE_SWEEPS,
            lambda sweep, previous, status: sweep_events(sweep, previous, status, clock()),
            self._written,
            phase_changed,
        )
        self._created: dict[SweepKey, set[str]] = {}
        self._refused: dict[SweepKey, dict[str, str]] = {}

    async def reconcile(self, key: SweepKey) -> float | None:
        """Reconcile a sweep.

        Returns:
            Seconds until the next reconcile without an event; None: none is needed.

        Raises:
            KubernetesError: The API server failed: reconcile again.
        """
        cached = self._caches.sweep(key)
        if cached is None or cached.deleting:
            self._created.pop(key, None)
            self._refused.pop(key, None)
            return None
        previous = parse_status(FinetuneSweepStatus, cached.status)
        try:
            sweep = parse_sweep(Document(content=cached.body))
        except JobError as error:
            await self._status.write(cached, previous, stalled_sweep(previous, error, cached.generation, self._clock()))
            self._metrics.passes.labels("stalled").inc()
            return None
        observed = self._observe(cached, sweep, previous)
        decision = decide_sweep(
            sweep,
            uid=cached.uid,
            generation=cached.generation,
            previous=previous,
            observed=observed,
            now=self._clock(),
            settings=self._settings,
        )
        # The status first: it records the parameters of the trials that are created next.
        if not await self._status.write(cached, previous, decision.status):
            return None
        newest = self._caches.sweep(key)
        if decision.expired:
            if newest is not None and newest.uid == cached.uid and newest.generation == cached.generation:
                logger.info("deleting sweep %s/%s: its ttlSecondsAfterFinished is over", *key)
                await self._kube.delete(FINETUNE_SWEEPS, *key, cached.uid, version=str(newest.version))
            return None
        is_complete = await self._execute(key, decision)
        self._metrics.passes.labels("ok").inc()
        if self._refused.get(key, {}).keys() != observed.refused.keys():
            return 0.0  # reconcile at once: the status has to show the refusal, or that it is over
        return decision.requeue_after if is_complete else self._settings.rejected_retry_seconds

    def _observe(self, cached: CachedSweep, sweep: FinetuneSweep, previous: FinetuneSweepStatus) -> ObservedSweep:
        trials = self._caches.trials(cached)
        own = {job.name for job in trials.values()} | self._created.get(cached.key, set())
        recorded = {trial.name for trial in previous.trials if trial.state == "Running"}
        upcoming = {sweep.trial_name(len(previous.trials) + number) for number in range(sweep.spec.max_concurrent)}
        others = (recorded | upcoming) - own
        taken = {name for name in others if self._jobs.job((cached.namespace, name)) is not None}
        return ObservedSweep(trials, frozenset(taken), dict(self._refused.get(cached.key, {})))

    async def _execute(self, key: SweepKey, decision: SweepDecision) -> bool:
        """Execute a decision; returns False if a job has the name of a trial, and the caches did not have it."""
        refused: dict[str, str] = {}
        created, is_complete = self._created.setdefault(key, set()), True
        for patch in decision.patch:  # first: they free nodes
            try:
                await self._patch(patch)
            except RefusedError as error:
                logger.warning("changing FinetuneJob %s failed: %s", patch.job.name, error)
                refused[patch.job.name] = str(error).partition("\n")[0]
        for manifest in decision.create:
            name = manifest["metadata"]["name"]
            try:
                if await self._kube.create(FINETUNE_JOBS, manifest):
                    created.add(name)
                elif name not in created:  # it may be somebody else's: then nothing of it wakes the sweep
                    is_complete = False
            except RefusedError as error:
                logger.warning("creating FinetuneJob %s failed: %s", name, error)
                refused[name] = str(error).partition("\n")[0]
        if refused:
            self._refused[key] = refused
        else:
            self._refused.pop(key, None)
        return is_complete

    async def _patch(self, patch: TrialPatch) -> None:
        metadata = {**patch.changes["metadata"], "uid": patch.job.uid}
        try:
            await self._kube.patch(
                FINETUNE_JOBS, patch.job.namespace, patch.job.name, {**patch.changes, "metadata": metadata}
            )
        except NotFoundError:  # it was deleted since: its event causes another reconcile
            return

    def _written(self, raw: dict[str, Any]) -> None:
        self._caches.put_written(raw)
