"""The operator's own Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_MINUTES: Final = (5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800, 3600)


class Metrics:
    """The operator's metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.pass_seconds = Histogram(
            "spotune_operator_reconcile_seconds",
            "Duration of one reconcile.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.passes = Counter(
            "spotune_operator_reconciles",
            "Reconciles of jobs, services and sweeps by result: ok, stalled (the spec cannot be applied), "
            "conflict (changed meanwhile) or error.",
            ["result"],
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "spotune_operator_queue_depth",
            "Jobs, services and sweeps that wait for a reconcile.",
            registry=self.registry,
        )
        self.api_calls = Counter(
            "spotune_operator_api_calls", "Requests to the API server by verb and kind.", ["verb", "kind"],
            registry=self.registry,
        )  # fmt: skip
        self.jobs = Gauge("spotune_operator_jobs", "FinetuneJobs by phase.", ["phase"], registry=self.registry)
        self.restarts = Counter(
            "spotune_operator_job_restarts", "Restarts of worker groups by cause.", ["cause"], registry=self.registry
        )
        self.recovery_seconds = Histogram(
            "spotune_operator_recovery_seconds",
            "Time from the end of training before a restart to the next new step, where the operator observed both.",
            buckets=_MINUTES,
            registry=self.registry,
        )
        self.notifications = Counter(
            "spotune_operator_notifications",
            "Notifications by result: sent, retried or dropped.",
            ["result"],
            registry=self.registry,
        )
        self.synced = Gauge("spotune_operator_synced", "1 once all caches are filled.", registry=self.registry)

    def count_phases(self, phases: Iterable[str]) -> None:
        """Set the number of jobs in each phase."""
        counted: dict[str, int] = {}
        for phase in phases:
            counted[phase] = counted.get(phase, 0) + 1
        self.jobs.clear()
        for phase, count in counted.items():
            self.jobs.labels(phase or "New").set(count)

    def count_notifications(self, result: str, number: int = 1) -> None:
        """Count notifications by result: ``sent``, ``retried`` or ``dropped``."""
        self.notifications.labels(result).inc(number)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
