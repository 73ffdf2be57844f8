"""Reconcile workers: they take keys from a work queue, reconcile them, and retry failed ones with backoff."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from spotune_operator.errors import KubernetesError
from spotune_operator.kube.client import ConflictError
from spotune_operator.observe.state import JobKey
from spotune_operator.runtime.logs import log_context
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.runtime.queue import WorkQueue
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)

Reconcile = Callable[[JobKey], Awaitable[float | None]]
"""Reconciles an object; returns seconds until its next reconcile without an event, None if none is needed."""


class ReconcileWorkers:
    """The work queue of all objects of one kind, and the workers that reconcile them.

    Args:
        kind: What the keys name.
        settings: The operator's.
        metrics: Counts reconciles that fail, and measures all of them.
    """

    def __init__(self, kind: Literal["job", "service", "sweep"], settings: Settings, metrics: Metrics) -> None:
        self._kind: Literal["job", "service", "sweep"] = kind
        self._debounce_seconds = settings.debounce_seconds
        self._metrics = metrics
        self._queue: WorkQueue[JobKey] = WorkQueue(settings.retry_seconds, settings.retry_max_seconds)
        self._reconciling_since: dict[JobKey, float] = {}

    def __len__(self) -> int:
        """Number of objects that wait for a reconcile."""
        return len(self._queue)

    def enqueue(self, key: JobKey) -> None:
        """Reconcile an object that changed, a moment later: one reconcile handles a burst of events."""
        self._queue.add(key, self._debounce_seconds)

    def hung(self, max_seconds: float) -> list[JobKey]:
        """Objects whose reconcile takes longer than this."""
        now = time.monotonic()
        return [key for key, start in self._reconciling_since.items() if now - start > max_seconds]

    async def run(self, reconcile: Reconcile) -> None:
        """Be one worker, until cancelled. Several may run at the same time; an object has one reconcile at a time.

        Args:
            reconcile: Reconciles an object; it counts its result, unless it raises an error.
        """
        while True:
            key = await self._queue.get()
            self._reconciling_since[key] = time.monotonic()
            with log_context(key, self._kind):
                await self._reconcile(key, reconcile)
            self._metrics.pass_seconds.observe(time.monotonic() - self._reconciling_since.pop(key))

    async def _reconcile(self, key: JobKey, reconcile: Reconcile) -> None:
        try:
            requeue_after = await reconcile(key)
        except ConflictError:  # the event of that change starts a reconcile earlier, in most cases
            self._metrics.passes.labels("conflict").inc()
            logger.info("changed during its reconcile; repeating it within %.0f s", self._queue.failed(key))
        except KubernetesError as error:
            self._metrics.passes.labels("error").inc()
            logger.warning("reconcile failed: %s; retrying in %.0f s", error, self._queue.failed(key))
        except Exception:  # a bug that one object triggers must not stop the reconciles of all others
            self._metrics.passes.labels("error").inc()
            logger.exception("reconcile failed with a bug of the operator; retrying in %.0f s", self._queue.failed(key))
        else:
            self._queue.done(key)
            if requeue_after is not None:
                self._queue.add(key, requeue_after)
