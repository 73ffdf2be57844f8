"""The node watch: a group yields before a node of its workers is removed, and for more slots that stay available.

When it leaves is decided from what the run has measured, and recorded with the values that were compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune.resize.leaving import Leave
from spotune.resize.replacements import ReplacementTimes
from spotune_trainer import files
from spotune_trainer.driver.world_size.node_watch import NodeWatch
from spotune_trainer.driver.world_size.resizing import Resizing, RunningGroup
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.result import Slots
from tests.trainer.support.runs import Runs

pytestmark = pytest.mark.usefixtures("stopped_clock")


@dataclass
class SimulatedAgents:
    """Agents on the nodes of a `Cluster`, without Ray."""

    cluster: Cluster

    def draining(self) -> dict[str, float]:
        return self.cluster.draining_now()

    def occupied(self) -> set[str]:
        return {"a", "b"}

    def unfit_nodes(self) -> list[dict[str, Any]]:
        return []

    def leave_out(self, rank: int, reason: str, at_least: int) -> bool:
        remaining = [node for node in self.cluster.nodes if node != "ab"[rank]]
        if len(remaining) < at_least:
            return False
        self.cluster.left_out.append(reason)
        self.cluster.nodes = remaining
        return True

    def ensure(self, gpus: bool) -> Slots:
        assert not gpus
        slots = len(set(self.cluster.nodes) - self.cluster.draining.keys())
        ready = slots - self.cluster.starting
        return Slots(slots, ready, ready - self.cluster.importing)


@dataclass
class Cluster:
    """Nodes with one slot each; a group of two workers runs on the first two."""

    runs: Runs
    directory: JobDirectory
    nodes: list[str] = field(default_factory=lambda: ["a", "b"])
    draining: dict[str, float] = field(default_factory=dict)
    starting: int = 0
    importing: int = 0
    replaced: list[float] = field(default_factory=list)
    desired: int = 4
    workers: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    now: float = 0.0
    errors: list[Exception] = field(default_factory=list)
    reads: int = 0

    @property
    def logs(self) -> GenerationLogs:
        return self.directory.generation_logs(1)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.directory)

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.ledger.records("leaving", "growth-postponed")

    def draining_now(self) -> dict[str, float]:
        if self.errors:
            raise self.errors.pop()
        return self.draining

    def watch(self) -> NodeWatch:
        self.logs.root.mkdir(parents=True)
        self.ledger.append("generation-started", generation=1, worldSize=2, step=100, planSeconds=1.0)
        group = RunningGroup(1, self.logs, world_size=2, planned_minimum=1)
        return NodeWatch(
            Resizing(group, self.ledger, ReplacementTimes(self.replaced)),
            self.job,
            SimulatedAgents(self),
            partial(self.ledger.append, generation=1),
            lambda: self.now,
        )

    def measure(self, step: int = 200, total: int = 10_000) -> None:
        """The group has made its first 100 steps, of 0.5 s each, and committed in 2 s; it started within 8 s."""
        started = self.ledger.records("generation-started")[0]["time"]
        progress = {
            "startedAt": started + 1.0,
            "step": step,
            "totalSteps": total,
            "seconds": {"productive": 45.0, "dataWait": 5.0, "startup": 3.0},
            "startup": {"engine": 3.0, "reference": 500.0, "firstStep": 1.0},
        }
        files.write_json(self.logs.progress, progress)
        self.ledger.append("committed", generation=1, step=150, seconds=2.0, stallSeconds=0.25)

    def job(self) -> FinetuneJob:
        self.reads += 1
        return self.runs.job(workers={"count": self.desired, "gpus": 0, "resizeCooldown": "60s", **self.workers})

    @property
    def notice(self) -> dict[str, Any] | None:
        notice: dict[str, Any] | None = files.read_json(self.logs.notice)
        return notice


@pytest.fixture
def cluster(runs: Runs, directory: JobDirectory) -> Cluster:
    return Cluster(runs, directory)


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
    assert (watch.preempted, watch.yield_reason) == (False, "the job asks for 1 workers now, 2 train")


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


def test_thread_checks_periodically_and_survives_errors_of_the_head_and_bugs(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"b": time.time() + 30}
    cluster.errors = [RuntimeError("the head is gone"), KeyError("of a bug")]
    with watch:
        until = time.monotonic() + 30
        while cluster.notice is None and time.monotonic() < until:
            time.sleep(0.1)
    assert watch.preempted


def test_without_measurements_the_event_reports_that_nothing_was_weighed(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"b": time.time() + 30}
    watch.check()
    (event,) = cluster.events
    assert (event["choice"], event["measured"], event["lostSeconds"]) == ("default", {}, {})
    assert event["why"].endswith("because the workers have made fewer than 5 steps since their start")
    assert watch.decision is not None
    assert (watch.decision.choice, watch.decision.patience_seconds) == (Leave.DEFAULT, 30.0)


def test_event_of_a_notice_has_what_was_measured_and_compared(cluster: Cluster) -> None:
    cluster.desired, cluster.replaced = 2, [40.0, 60.0]
    watch = cluster.watch()
    watch.check()
    cluster.measure()
    cluster.draining = {"b": time.time() + 30}
    watch.check()
    (event,) = cluster.events
    assert event["measured"] == {
        "stepSeconds": {"2": 0.5},
        "commitSeconds": 2.0,
        "stallSeconds": 0.25,
        "changeSeconds": {"plan": 1.0, "workers": 1.0, "restore": 2.0, "engine": 3.0, "firstStep": 1.0},
        "replacementSeconds": [40.0, 60.0],
    }
    assert (event["choice"], event["slots"], event["stepsLeft"]) == ("waitForReplacement", 1, 9800)
    assert event["arrivalSeconds"] == [40.0, 60.0]
    assert event["lostSeconds"].keys() == {"leaveNow", "waitForReplacement", "trainOn", "default"}
    assert event["lostSeconds"]["waitForReplacement"] == min(event["lostSeconds"].values())
    assert event["patienceSeconds"] == pytest.approx(1.1 * 60 - 24 + 1, abs=1.5)
    assert cluster.notice is not None
    assert cluster.notice["deadline"] == pytest.approx(cluster.draining["b"], abs=1)


def test_group_with_a_free_slot_leaves_at_once(cluster: Cluster) -> None:
    cluster.desired = 2
    watch = cluster.watch()
    cluster.nodes.append("c")
    watch.check()
    cluster.measure()
    cluster.draining = {"b": time.time() + 120}
    watch.check()
    (event,) = cluster.events
    assert event["choice"] == "leaveNow"
    assert event["seconds"] == pytest.approx(120, abs=1)
    assert cluster.notice is not None
    assert cluster.notice["deadline"] is None
    assert watch.deadline == cluster.draining["b"]


def test_second_draining_node_is_decided_on_anew(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.draining = {"b": time.time() + 60}
    check_for(watch, cluster, 3)
    cluster.draining["a"] = time.time() + 20
    check_for(watch, cluster, 3)
    assert [event["reason"] for event in cluster.events] == [
        "1 node(s) of the workers are draining",
        "2 node(s) of the workers are draining",
    ]
    assert cluster.notice is not None
    assert cluster.notice["deadline"] == pytest.approx(cluster.draining["a"], abs=1)


def test_requested_scale_down_is_notified_once(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.desired = 1
    cluster.draining = {"b": time.time() + 30}
    check_for(watch, cluster, 5)
    assert len(cluster.events) == 1


def test_replacement_is_measured_from_the_notice_until_its_slot_is_ready(cluster: Cluster) -> None:
    cluster.desired = 2
    watch = cluster.watch()
    watch.check()
    cluster.draining = {"b": time.time() + 30}
    check_for(watch, cluster, 20)
    cluster.nodes.append("c")
    cluster.starting = 1
    check_for(watch, cluster, 5)
    cluster.starting = 0
    check_for(watch, cluster, 1)
    assert watch._resizing.replacements.seconds == (25.0,)


def test_group_trains_on_while_a_new_node_imports_modules(cluster: Cluster) -> None:
    """The whole group would wait for the imports."""
    watch = cluster.watch()
    cluster.nodes, cluster.importing = ["a", "b", "c"], 1
    check_for(watch, cluster, 200)
    assert watch.yield_reason is None
    cluster.importing = 0
    check_for(watch, cluster, 20)
    assert watch.yield_reason == "there are slots for 3 workers, 2 train"


def test_group_does_not_grow_for_the_last_steps(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.measure(step=9970)
    cluster.nodes.append("c")
    check_for(watch, cluster, 100)
    (event,) = cluster.events
    assert (event["event"], event["choice"]) == ("growth-postponed", "keep")
    assert cluster.notice is None


def test_group_grows_once_and_not_just_before_another_worker_comes(cluster: Cluster) -> None:
    """A fourth worker is expected 80 s after it was lost; until then the group of two trains on."""
    cluster.nodes += ["c", "d"]
    cluster.replaced = [80.0]
    watch = cluster.watch()
    check_for(watch, cluster, 1)
    cluster.measure()
    cluster.nodes.remove("d")
    check_for(watch, cluster, 65)
    (postponed,) = cluster.events
    assert (postponed["event"], postponed["choice"]) == ("growth-postponed", "waitForMore")
    assert postponed["arrivalSeconds"] == [pytest.approx(80 - 58, abs=2)]
    cluster.nodes.append("d")
    check_for(watch, cluster, 1)
    assert watch.yield_reason == "there are slots for 4 workers, 2 train"
    assert cluster.events[-1]["choice"] == "grow"
    assert cluster.notice is not None
    assert cluster.notice["commitWithin"] == pytest.approx(0.5, abs=0.01)


def test_group_leaves_the_node_of_a_straggler(cluster: Cluster) -> None:
    cluster.workers, cluster.desired = {"onStraggler": "replace", "min": 1}, 2
    watch = cluster.watch()
    check_for(watch, cluster, 10)
    assert cluster.notice is None, "no rank is slow"
    straggler = {"rank": 1, "node": "b", "ratio": 1.5, "since": time.time() - 600}
    files.write_json(cluster.logs.progress, {"stragglers": [straggler]})
    check_for(watch, cluster, 10)
    assert cluster.notice is not None
    assert (cluster.notice["leave"], cluster.notice["deadline"]) == (True, None), "a planned commit"
    reason = "rank 1 on b took 1.50 of the median for 10 minutes"
    assert (watch.preempted, watch.yield_reason) == (False, reason)
    assert cluster.left_out == [f"straggler: {reason}"]
