"""The metrics of restarts and recoveries, from statuses on a fake clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from spotune.custom_resource import Condition
from spotune.job import FinetuneJobStatus
from spotune_operator.kube.conditions import ConditionStatus
from spotune_operator.reconcile.restart_metrics import RestartMetrics
from spotune_operator.runtime.metrics import Metrics

KEY = ("team", "job")


def a_status(
    *, training: bool, step: int, others: Mapping[str, ConditionStatus] | None = None, **restarts: int
) -> FinetuneJobStatus:
    """A status with the condition Training and others, by type."""
    statuses: dict[str, ConditionStatus] = {"Training": "True" if training else "False", **(others or {})}
    conditions = [
        Condition(type=name, status=status, reason="Steps", message="", last_transition_time="2026-11-21T10:00:00Z")
        for name, status in statuses.items()
    ]
    return FinetuneJobStatus.model_validate(
        {"conditions": conditions, "highestStep": step, "restarts": {**restarts, "total": sum(restarts.values())}}
    )


@dataclass
class Bench:
    """The metrics of one job, whose status changes."""

    now: float = 1000.0
    metrics: Metrics = field(default_factory=Metrics)
    status: FinetuneJobStatus = field(default_factory=lambda: a_status(training=True, step=10))

    def __post_init__(self) -> None:
        self.restarts = RestartMetrics(self.metrics, lambda: self.now)

    def change(self, seconds: float, **status: Any) -> None:
        self.now += seconds
        previous, self.status = self.status, a_status(**status)
        self.restarts.record(KEY, previous, self.status)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def test_restarts_are_counted_by_cause() -> None:
    bench = Bench()
    bench.change(1, training=False, step=10, hang=1)
    bench.change(1, training=True, step=10, hang=1, workerLost=2)
    assert bench.value("spotune_operator_job_restarts_total", cause="hang") == 1
    assert bench.value("spotune_operator_job_restarts_total", cause="workerLost") == 2
    assert bench.value("spotune_operator_job_restarts_total", cause="total") is None


def test_recovery_lasts_from_the_end_of_training_to_the_next_new_step() -> None:
    bench = Bench()
    bench.change(5, training=False, step=10)
    bench.change(20, training=True, step=10)  # it repeats steps that were not committed
    bench.change(15, training=True, step=11)
    bench.change(10, training=True, step=12)
    assert bench.value("spotune_operator_recovery_seconds_count") == 1
    assert bench.value("spotune_operator_recovery_seconds_sum") == 35


def test_second_loss_before_a_new_step_belongs_to_the_same_recovery() -> None:
    bench = Bench()
    bench.change(0, training=False, step=10)
    bench.change(30, training=True, step=10)
    bench.change(5, training=False, step=10)
    bench.change(30, training=True, step=11)
    assert bench.value("spotune_operator_recovery_seconds_count") == 1
    assert bench.value("spotune_operator_recovery_seconds_sum") == 65


def test_deleted_job_leaves_no_recovery_to_its_successor() -> None:
    bench = Bench()
    bench.change(0, training=False, step=10)
    bench.restarts.forget(KEY)
    bench.change(30, training=True, step=11)
    assert bench.value("spotune_operator_recovery_seconds_count") == 0


@pytest.mark.parametrize("others", [{"Suspended": "Unknown"}, {"Suspended": "True"}, {"Complete": "True"}], ids=str)
def test_a_job_that_was_suspended_or_had_ended_has_not_recovered(others: Mapping[str, ConditionStatus]) -> None:
    bench = Bench()
    bench.change(5, training=False, step=10, others=others)
    bench.change(86400, training=False, step=10)
    bench.change(60, training=True, step=11)
    assert bench.value("spotune_operator_recovery_seconds_count") == 0
