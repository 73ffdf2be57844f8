"""The driver on a simulated cluster whose nodes are drained: what the next group waits for, and what is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from spotune_trainer import files
from spotune_trainer.driver.world_size.measured_times import lost_early_share
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.result import Yielded
from tests.trainer.support.drivers import events, make_driver, status
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import LOST, TRAINED, ScriptedGroup, SimulatedCluster
from tests.trainer.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("stopped_clock")


def drain_during_group(
    cluster: SimulatedCluster, directory: JobDirectory, node: str, seconds: float = 30
) -> Callable[[], object]:
    """Returns a function that drains the node, and waits until the running group has been notified."""

    def drain() -> None:
        cluster.draining[node] = time.time() + seconds
        assert wait_until(directory.generation_logs(len(cluster.tasks)).notice.exists, 60)

    return drain


def test_group_that_yields_to_a_draining_node_is_replaced_on_the_remaining_nodes(
    runs: Runs, directory: JobDirectory
) -> None:
    cluster = SimulatedCluster(
        [ScriptedGroup(Yielded(), last_step=6, commits=[6]), ScriptedGroup(TRAINED, last_step=10)]
    )
    cluster.groups[0].before_exit = drain_during_group(cluster, directory, "n1")
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert cluster.sizes == [2, 1]
    assert cluster.now == pytest.approx(30, abs=1), "the driver waits for a replacement worker, for a limited time"
    assert cluster.tasks[1].restore == "step-00000006.gen-1"
    (failure,) = events(driver, "failure")
    assert failure["cause"] == "preempted"
    assert failure["message"] == "1 node(s) of the workers are draining; the state is committed"
    assert [event["generation"] for event in events(driver, "leaving")] == [1]
    assert events(driver, "generation-started")[1]["stepsLost"] == 0
    assert status(directory)["restarts"]["preempted"] == 1


def measured_group(
    cluster: SimulatedCluster, directory: JobDirectory, then: Callable[[], object]
) -> Callable[[], None]:
    """Returns a function that writes what a group of 0.1 s steps measures, and calls `then`."""

    def write() -> None:
        logs = directory.generation_logs(len(cluster.tasks))
        ledger = Ledger(directory)
        started = ledger.records("generation-started")[-1]
        ledger.append("committed", generation=len(cluster.tasks), step=6, seconds=0.5, stallSeconds=0.1)
        progress = {"startedAt": started["time"], "step": started["step"] + 6, "totalSteps": 10_000, "heartbeat": 1}
        measured = {"seconds": {"productive": 0.6}, "startup": {"engine": 2.0}, "part": "productive"}
        files.write_json(logs.progress, {**progress, **measured, "time": time.time()})
        then()

    return write


@pytest.mark.parametrize(("replaced", "waits"), [(5000.0, 0.0), (40.0, 1.1 * 40 - 20)])
def test_next_group_waits_for_a_replacement_as_long_as_was_decided(
    runs: Runs, directory: JobDirectory, replaced: float, waits: float
) -> None:
    """The node is lost in 30 s. A replacement that takes 40 s is waited for, and one that takes 5000 s is not."""
    cluster = SimulatedCluster(
        [ScriptedGroup(Yielded(), last_step=6, commits=[6]), ScriptedGroup(TRAINED, last_step=10)]
    )
    cluster.groups[0].before_exit = measured_group(cluster, directory, drain_during_group(cluster, directory, "n1"))
    Ledger(directory).append("replaced", seconds=replaced)
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert cluster.sizes == [2, 1]
    (event,) = events(driver, "leaving")
    assert event["choice"] == ("trainOn" if waits == 0 else "waitForReplacement")
    assert cluster.now == pytest.approx(event["patienceSeconds"], abs=1)
    assert cluster.now == pytest.approx(waits, abs=8)


def test_node_that_has_joined_is_waited_for_even_if_no_wait_was_decided(runs: Runs, directory: JobDirectory) -> None:
    """A smaller group would have to leave for a larger one soon."""
    cluster = SimulatedCluster(
        [ScriptedGroup(Yielded(), last_step=6, commits=[6]), ScriptedGroup(TRAINED, last_step=10)]
    )
    drain = drain_during_group(cluster, directory, "n1")

    def drain_and_join() -> None:
        drain()
        cluster.slots, cluster.ready = 3, 1

    def become_ready() -> None:
        cluster.ready = 2 if cluster.now >= 8 else 1

    cluster.groups[0].before_exit = measured_group(cluster, directory, drain_and_join)
    cluster.while_sleeping = become_ready
    Ledger(directory).append("replaced", seconds=5000.0)
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert events(driver, "leaving")[0]["choice"] == "trainOn"
    assert cluster.sizes == [2, 2]
    assert cluster.now == pytest.approx(8, abs=1)


def test_replacement_is_measured_for_the_next_notice(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster(
        [ScriptedGroup(Yielded(), last_step=6, commits=[6]), ScriptedGroup(TRAINED, last_step=10)]
    )
    cluster.groups[0].before_exit = drain_during_group(cluster, directory, "n1")

    def replace_node() -> None:
        cluster.slots = 3 if cluster.now >= 12 else 2

    cluster.while_sleeping = replace_node
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert cluster.sizes == [2, 2]
    assert [event["seconds"] for event in events(driver, "replaced")] == [pytest.approx(12, abs=1)]
    assert driver.ledger.replacement_seconds() == [pytest.approx(12, abs=1)]


@pytest.mark.parametrize(("seconds", "early"), [(30, True), (-1, False)])
def test_node_that_is_lost_before_its_deadline_is_recorded(
    runs: Runs, directory: JobDirectory, seconds: float, early: bool
) -> None:
    cluster = SimulatedCluster([ScriptedGroup(LOST, last_step=6, commits=[5]), ScriptedGroup(TRAINED, last_step=10)])
    cluster.groups[0].before_exit = drain_during_group(cluster, directory, "n0", seconds)
    driver = make_driver(runs, directory, cluster)
    driver.run()
    (failure,) = events(driver, "failure")
    assert failure["beforeDeadline"] is early
    assert lost_early_share(driver.ledger) == (0.5 if early else 0)


def test_worker_lost_with_a_draining_node_counts_as_preempted(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(LOST, last_step=6, commits=[5]), ScriptedGroup(TRAINED, last_step=10)])
    cluster.groups[0].before_exit = drain_during_group(cluster, directory, "n0")
    driver = make_driver(runs, directory, cluster)
    driver.run()
    (failure,) = events(driver, "failure")
    assert (failure["cause"], failure["message"]) == ("preempted", LOST.message)
