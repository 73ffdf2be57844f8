"""Caches of FinetuneSweeps and of the FinetuneJobs of their trials, each filled by a reflector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spotune.sweep import SWEEP_KIND
from spotune_operator.children.trial import SWEEP_LABEL
from spotune_operator.kube.cached_resource import CachedResource, WrittenVersions
from spotune_operator.kube.client import FINETUNE_JOBS, FINETUNE_SWEEPS, Kube
from spotune_operator.kube.reflector import Reflector
from spotune_operator.settings import Settings
from spotune_operator.sweeps.state import SweepKey, TrialJob, trial_job_view


class CachedSweep(CachedResource):
    """A FinetuneSweep in the cache."""

    kind = SWEEP_KIND


class SweepCaches:
    """The caches of sweeps and trials. They are complete once ``synced`` returns.

    Args:
        kube: The API server.
        settings: The operator's.
        changed: Called with the key of a sweep when it or a job of one of its trials changes.
    """

    def __init__(self, kube: Kube, settings: Settings, changed: Callable[[SweepKey], None]) -> None:
        self._written: WrittenVersions[CachedSweep] = WrittenVersions()
        self._sweeps = {
            name: Reflector(kube, FINETUNE_SWEEPS, CachedSweep.of, lambda found: found.key, changed, namespace=name)
            for name in settings.namespaces
        }
        self._trials = {
            name: Reflector(kube, FINETUNE_JOBS, trial_job_view, _key, changed, labels=SWEEP_LABEL, namespace=name)
            for name in settings.namespaces
        }

    def reflectors(self) -> Sequence[Reflector[Any]]:
        """All reflectors; the caller runs them."""
        return [*self._sweeps.values(), *self._trials.values()]

    async def synced(self) -> None:
        """Wait until all caches are filled."""
        await asyncio.gather(*(reflector.synced.wait() for reflector in self.reflectors()))

    def sweep(self, key: SweepKey) -> CachedSweep | None:
        """A FinetuneSweep, in the newest version known; None if there is none of this key."""
        reflector = self._sweeps.get("") or self._sweeps[key[0]]
        return self._written.newest(key, next(iter(reflector.of(key).values()), None))

    def put_written(self, raw: Mapping[str, Any]) -> None:
        """Store a sweep as returned by a write, until the watch reports that version."""
        self._written.put(CachedSweep.of(raw))

    def trials(self, sweep: CachedSweep) -> dict[int, TrialJob]:
        """The jobs of a sweep by number of the trial; one with its label but another owner is none of them."""
        reflector = self._trials.get("") or self._trials[sweep.namespace]
        jobs = reflector.of(sweep.key).values()
        return {job.number: job for job in jobs if job.owner == sweep.uid and job.number is not None}


def _key(job: TrialJob) -> SweepKey | None:
    """The sweep of a job; None if its label names none."""
    return (job.namespace, job.sweep) if job.sweep else None
