"""The metrics of a job's restarts, from the changes of its status."""

from __future__ import annotations

from collections.abc import Callable

from spotune.job import FinetuneJobStatus
from spotune_operator.kube.conditions import find, is_true
from spotune_operator.observe.state import JobKey
from spotune_operator.runtime.metrics import Metrics


class RestartMetrics:
    """Counts restarts by cause, and measures recoveries.

    Args:
        metrics: Gets both.
        clock: Returns Unix time.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._interrupted_at: dict[JobKey, float] = {}

    def record(self, key: JobKey, previous: FinetuneJobStatus, status: FinetuneJobStatus) -> None:
        """Count new restarts, and measure the time from the end of ``Training`` to the next new step.

        Args:
            key: The job.
            previous: Its status before.
            status: Its status now.
        """
        before = previous.restarts.model_dump(mode="json")
        for cause, count in status.restarts.model_dump(mode="json").items():
            if cause != "total" and count > before[cause]:
                self._metrics.restarts.labels(cause).inc(count - before[cause])
        if _has_stopped(status):
            self._interrupted_at.pop(key, None)  # what follows is no recovery
        elif is_true(previous.conditions, "Training") and not is_true(status.conditions, "Training"):
            self._interrupted_at.setdefault(key, self._clock())
        elif status.highest_step > previous.highest_step and key in self._interrupted_at:
            self._metrics.recovery_seconds.observe(self._clock() - self._interrupted_at.pop(key))

    def forget(self, key: JobKey) -> None:
        """Forget a deleted job."""
        self._interrupted_at.pop(key, None)


def _has_stopped(status: FinetuneJobStatus) -> bool:
    """Whether the workers stop because the job has ended, is suspended, or has cost what it may."""
    suspended = find(status.conditions, "Suspended")
    is_suspended = suspended is not None and suspended.status != "False"
    return is_suspended or is_true(status.conditions, "Complete") or is_true(status.conditions, "Failed")
