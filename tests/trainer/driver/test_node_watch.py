"""The node watch: a group yields before a node of its workers is removed, and for more slots that stay available."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.driver.node_watch import NodeWatch
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.worker_group.result import Slots
from tests.trainer.support.runs import Runs


@dataclass
class SimulatedAgents:
    """Agents on the nodes of a `Cluster`, without Ray."""

    cluster: Cluster

    def draining(self) -> dict[str, float]:
        return self.cluster.draining_now()

    def occupied(self) -> set[str]:
        return {"a", "b"}

    def ensure(self, gpus: bool) -> Slots:
        assert not gpus
        slots = len(set(self.cluster.nodes) - self.cluster.draining.keys())
        return Slots(slots, slots)


@dataclass
class Cluster:
    """Nodes with one slot each; a group of two workers runs on the first two."""

    runs: Runs
    logs: GenerationLogs
    nodes: list[str] = field(default_factory=lambda: ["a", "b"])
    draining: dict[str, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    desired: int = 4
    now: float = 0.0
    errors: list[Exception] = field(default_factory=list)
    reads: int = 0

    def draining_now(self) -> dict[str, float]:
        if self.errors:
            raise self.errors.pop()
        return self.draining

    def watch(self) -> NodeWatch:
        self.logs.root.mkdir()
        return NodeWatch(
            self.logs,
            2,
            self.job,
            SimulatedAgents(self),
            lambda **event: self.events.append(event),
            lambda: self.now,
        )

    def job(self) -> FinetuneJob:
        self.reads += 1
        return self.runs.job(workers={"count": self.desired, "gpus": 0, "resizeCooldown": "60s"})

    @property
    def notice(self) -> dict[str, Any] | None:
        notice: dict[str, Any] | None = files.read_json(self.logs.notice)
        return notice


@pytest.fixture
def cluster(runs: Runs, tmp_path: Path) -> Cluster:
    return Cluster(runs, GenerationLogs(tmp_path / "gen-1"))


def check_for(watch: NodeWatch, cluster: Cluster, seconds: int) -> None:
    """Check once a second."""
    for _ in range(seconds):
        cluster.now += 1
        watch.check()


def test_no_notice_while_no_node_drains_or_joins(cluster: Cluster) -> None:
    watch = cluster.watch()
    check_for(watch, cluster, 200)
    assert (cluster.notice, watch.yield_reason, watch.preempted) == (None, None, False)


def test_group_is_notified_once_with_the_deadline_of_a_draining_node(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"b": time.time() + 30}
    check_for(watch, cluster, 3)
    notice = cluster.notice
    assert notice is not None
    assert (notice["leave"], notice["stop"]) == (True, False)
    assert notice["deadline"] == pytest.approx(cluster.draining["b"], abs=1)
    assert watch.preempted
    assert len(cluster.events) == 1
    assert cluster.events[0]["seconds"] == pytest.approx(30, abs=1)


def test_notice_has_the_earliest_deadline(cluster: Cluster) -> None:
    watch = cluster.watch()
    soon = time.time() + 10
    cluster.draining = {"a": soon + 50, "b": soon}
    watch.check()
    assert cluster.notice is not None
    assert cluster.notice["deadline"] == pytest.approx(soon, abs=1)


def test_draining_node_without_a_deadline_gives_a_notice_without_one(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"a": 0.0}
    watch.check()
    assert cluster.notice is not None
    assert cluster.notice["deadline"] is None


def test_draining_node_without_workers_is_ignored(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.nodes.append("c")
    cluster.draining = {"c": time.time() + 30}
    check_for(watch, cluster, 200)
    assert cluster.notice is None


def test_requested_scale_down_is_not_a_preemption(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.desired = 1
    cluster.draining = {"b": time.time() + 30}
    watch.check()
    assert cluster.notice is not None
    assert (watch.preempted, watch.yield_reason) == (False, "fewer workers are requested")


def test_group_yields_to_more_slots_only_after_the_resize_cooldown(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.nodes.append("c")
    check_for(watch, cluster, 59)
    assert cluster.notice is None
    check_for(watch, cluster, 1)
    assert cluster.notice is not None
    assert (cluster.notice["leave"], cluster.notice["deadline"]) == (True, None)
    assert watch.yield_reason == "there are slots for 3 workers, 2 train"
    assert not watch.preempted


def test_job_is_read_once_per_check(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.nodes.append("c")
    check_for(watch, cluster, 60)
    assert watch.yield_reason is not None
    assert cluster.reads == 60


def test_slots_that_come_and_go_do_not_resize_the_group(cluster: Cluster) -> None:
    watch = cluster.watch()
    check_for(watch, cluster, 100)
    for _ in range(20):
        cluster.nodes.append("c")
        check_for(watch, cluster, 9)
        cluster.nodes.remove("c")
        check_for(watch, cluster, 1)
    assert cluster.notice is None
    cluster.nodes.append("c")
    check_for(watch, cluster, 11)
    assert cluster.notice is not None


def test_more_slots_than_desired_do_not_resize_the_group(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.desired = 2
    cluster.nodes += ["c", "d"]
    check_for(watch, cluster, 200)
    assert cluster.notice is None


def test_deadline_takes_precedence_over_more_slots(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.nodes += ["c", "d"]
    check_for(watch, cluster, 60)
    assert not watch.preempted
    cluster.draining = {"a": time.time() + 30}
    check_for(watch, cluster, 5)
    assert watch.preempted
    assert cluster.notice is not None
    assert cluster.notice["deadline"] is not None
    assert len(cluster.events) == 2


def test_thread_checks_periodically_and_survives_errors_of_the_head(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"b": time.time() + 30}
    cluster.errors = [RuntimeError("the head is gone")]
    with watch:
        until = time.monotonic() + 30
        while cluster.notice is None and time.monotonic() < until:
            time.sleep(0.1)
    assert watch.preempted
