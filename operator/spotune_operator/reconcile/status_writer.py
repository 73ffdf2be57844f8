"""Writes the status of a job, the Events for its changes, and the metrics of its restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotune.job import FinetuneJobStatus
from spotune_operator.errors import NotFoundError
from spotune_operator.kube.client import EVENTS, JOBS, Kube
from spotune_operator.kube.conditions import is_true
from spotune_operator.kube.merge_patch import merge_patch
from spotune_operator.observe.caches import CachedJob, Caches
from spotune_operator.observe.state import JobKey
from spotune_operator.reconcile.events import job_events
from spotune_operator.runtime.metrics import Metrics


class StatusWriter:
    """Writes statuses.

    Args:
        kube: The API server.
        caches: The cache of jobs, which gets the written object.
        metrics: Counts restarts and measures recoveries.
        clock: Returns Unix time.
    """

    def __init__(self, kube: Kube, caches: Caches, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._caches = caches
        self._metrics = metrics
        self._clock = clock
        self._interrupted_at: dict[JobKey, float] = {}

    async def write(self, job: CachedJob, previous: FinetuneJobStatus, status: FinetuneJobStatus) -> bool:
        """Write a status that has changed, after the Events for its changes.

        Args:
            job: The job in the cache.
            previous: Its status, as this version parses it.
            status: Its new status.

        Returns:
            Whether the job still exists.
        """
        content = _content(status)
        missing = {name: content[name] for name in content.keys() - job.status.keys()}
        changes = merge_patch(_content(previous), content) | missing
        if not changes:
            return True
        for event in job_events(job, previous, status, self._clock()):
            await self._kube.create(EVENTS, event)
        self._record_metrics(job.key, previous, status)
        try:
            patch = {"metadata": {"uid": job.uid}, "status": changes}
            written = await self._kube.patch(JOBS, *job.key, patch, "status")
        except NotFoundError:
            self._caches.forget_job(job.key)
            return False
        self._caches.put_job(written)
        return True

    def forget(self, key: JobKey) -> None:
        """Forget a deleted job."""
        self._interrupted_at.pop(key, None)

    def _record_metrics(self, key: JobKey, previous: FinetuneJobStatus, status: FinetuneJobStatus) -> None:
        """Count restarts, and measure the time from the end of ``Training`` to the next new step."""
        before = previous.restarts.model_dump(mode="json")
        for cause, count in status.restarts.model_dump(mode="json").items():
            if cause != "total" and count > before[cause]:
                self._metrics.restarts.labels(cause).inc(count - before[cause])
        if is_true(previous.conditions, "Training") and not is_true(status.conditions, "Training"):
            self._interrupted_at.setdefault(key, self._clock())
        elif status.highest_step > previous.highest_step and key in self._interrupted_at:
            self._metrics.recovery_seconds.observe(self._clock() - self._interrupted_at.pop(key))


def _content(status: FinetuneJobStatus) -> dict[str, Any]:
    content: dict[str, Any] = status.model_dump(mode="json", exclude_none=True)
    return content
