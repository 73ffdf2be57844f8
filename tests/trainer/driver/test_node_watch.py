"""The driver's watch over nodes: a group leaves before a node of its workers goes, and for room that lasts."""

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
from spotune_trainer.worker_group.result import Room
from tests.trainer.support.runs import Runs


@dataclass
class Stub:
    """Agents on the nodes of a `Cluster`, without Ray."""

    cluster: Cluster

    def draining(self) -> dict[str, float]:
        return self.cluster.draining_now()

    def occupied(self) -> set[str]:
        return {"a", "b"}

    def muster(self, gpus: bool) -> Room:
        assert not gpus
        slots = len(set(self.cluster.nodes) - self.cluster.draining.keys())
        return Room(slots, slots)


@dataclass
class Cluster:
    """Nodes with one slot each, of which a group of two occupies the first two."""

    runs: Runs
    logs: GenerationLogs
    nodes: list[str] = field(default_factory=lambda: ["a", "b"])
    draining: dict[str, float] = field(default_factory=dict)
    said: list[dict[str, Any]] = field(default_factory=list)
    wanted: int = 4
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
            Stub(self),
            lambda **said: self.said.append(said),
            lambda: self.now,
        )

    def job(self) -> FinetuneJob:
        self.reads += 1
        return self.runs.job(workers={"count": self.wanted, "gpus": 0, "resizeCooldown": "60s"})

    @property
    def notice(self) -> dict[str, Any] | None:
        notice: dict[str, Any] | None = files.read_json(self.logs.notice)
        return notice


@pytest.fixture
def cluster(runs: Runs, tmp_path: Path) -> Cluster:
    return Cluster(runs, GenerationLogs(tmp_path / "gen-1"))


def look_for(watch: NodeWatch, cluster: Cluster, seconds: int) -> None:
    for _ in range(seconds):
        cluster.now += 1
        watch.look()


def test_nothing_is_said_while_nothing_happens(cluster: Cluster) -> None:
    watch = cluster.watch()
    look_for(watch, cluster, 200)
    assert (cluster.notice, watch.leaving_for, watch.preempted) == (None, None, False)


def test_a_group_is_told_once_how_long_the_node_of_a_worker_has(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"b": time.time() + 30}
    look_for(watch, cluster, 3)
    notice = cluster.notice
    assert notice is not None
    assert (notice["leave"], notice["stop"]) == (True, False)
    assert notice["deadline"] == pytest.approx(cluster.draining["b"], abs=1)
    assert watch.preempted
    assert len(cluster.said) == 1
    assert cluster.said[0]["seconds"] == pytest.approx(30, abs=1)


def test_the_first_of_several_deadlines_counts(cluster: Cluster) -> None:
    watch = cluster.watch()
    soon = time.time() + 10
    cluster.draining = {"a": soon + 50, "b": soon}
    watch.look()
    assert cluster.notice is not None
    assert cluster.notice["deadline"] == pytest.approx(soon, abs=1)


def test_a_node_that_goes_without_a_deadline_has_time(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"a": 0.0}
    watch.look()
    assert cluster.notice is not None
    assert cluster.notice["deadline"] is None


def test_nodes_of_others_do_not_matter(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.nodes.append("c")
    cluster.draining = {"c": time.time() + 30}
    look_for(watch, cluster, 200)
    assert cluster.notice is None


def test_fewer_workers_by_request_are_no_preemption(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.wanted = 1
    cluster.draining = {"b": time.time() + 30}
    watch.look()
    assert cluster.notice is not None
    assert (watch.preempted, watch.leaving_for) == (False, "fewer workers are wanted")


def test_a_group_leaves_for_room_that_lasts_and_not_before_its_cooldown(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.nodes.append("c")
    look_for(watch, cluster, 59)
    assert cluster.notice is None
    look_for(watch, cluster, 1)
    assert cluster.notice is not None
    assert (cluster.notice["leave"], cluster.notice["deadline"]) == (True, None)
    assert watch.leaving_for == "there is room for 3 workers, 2 train"
    assert not watch.preempted


def test_the_job_is_read_once_a_look(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.nodes.append("c")
    look_for(watch, cluster, 60)
    assert watch.leaving_for is not None
    assert cluster.reads == 60


def test_room_that_comes_and_goes_moves_nobody(cluster: Cluster) -> None:
    watch = cluster.watch()
    look_for(watch, cluster, 100)
    for _ in range(20):
        cluster.nodes.append("c")
        look_for(watch, cluster, 9)
        cluster.nodes.remove("c")
        look_for(watch, cluster, 1)
    assert cluster.notice is None
    cluster.nodes.append("c")
    look_for(watch, cluster, 11)
    assert cluster.notice is not None


def test_more_room_than_is_wanted_moves_nobody(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.wanted = 2
    cluster.nodes += ["c", "d"]
    look_for(watch, cluster, 200)
    assert cluster.notice is None


def test_a_deadline_comes_before_room_for_more(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.nodes += ["c", "d"]
    look_for(watch, cluster, 60)
    assert not watch.preempted
    cluster.draining = {"a": time.time() + 30}
    look_for(watch, cluster, 5)
    assert watch.preempted
    assert cluster.notice is not None
    assert cluster.notice["deadline"] is not None
    assert len(cluster.said) == 2


def test_the_thread_looks_by_itself_and_survives_a_head_that_is_going(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"b": time.time() + 30}
    cluster.errors = [RuntimeError("the head is gone")]
    with watch:
        until = time.monotonic() + 30
        while cluster.notice is None and time.monotonic() < until:
            time.sleep(0.1)
    assert watch.preempted
