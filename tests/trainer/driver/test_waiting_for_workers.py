"""The driver on a simulated cluster: how many workers it waits for, and what it reports meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from spotune.errors import JobError
from spotune.plan.execution import ExecutionPlan, MinimumPlan
from spotune_trainer import files
from spotune_trainer.driver import planning
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.run_plan import RunPlan
from tests.trainer.support.drivers import events, make_driver, status
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import TRAINED, ScriptedGroup, SimulatedCluster


def test_driver_waits_for_missing_workers_then_starts_with_fewer(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], slots=2)
    make_driver(runs, directory, cluster, count=4, minimum=2).run()
    assert cluster.sizes == [2]
    assert cluster.started == pytest.approx([30], abs=1)


def test_driver_waits_for_the_minimum_of_workers_and_reports_it(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], slots=1)
    cluster.unfit = [{"node": "n7", "boot": "b", "reason": "GPU 0 (A100): it is too hot", "since": 1.0}]
    statuses: list[dict[str, Any]] = []

    def record_status() -> None:
        statuses.append(status(directory))
        if cluster.now > 100:
            cluster.slots = 4

    cluster.while_sleeping = record_status
    driver = make_driver(runs, directory, cluster, count=4, minimum=2)
    driver.run()
    assert cluster.sizes == [4]
    (waiting,) = events(driver, "waiting")
    assert (waiting["slots"], waiting["wanted"]) == (1, 4)
    assert (statuses[0]["phase"], statuses[0]["workers"]) == ("WaitingForWorkers", {"running": 0, "wanted": 4})
    ready, unfit = (
        "1 of 4 workers are ready, 2 are needed",
        "node n7 is unfit and is left out: GPU 0 (A100): it is too hot",
    )
    assert statuses[0]["message"] == f"{ready}; waiting for other nodes; {unfit}"
    assert statuses[0]["unfitNodes"] == cluster.unfit
    heartbeats = [each["heartbeat"] for each in statuses]
    assert heartbeats == sorted(set(heartbeats)), "the heartbeat grows while the driver waits"


def needs_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plan of a model find that it fits on two workers and on no fewer."""
    execution = ExecutionPlan(3, 4, gradient_checkpointing=True, compile=False, reason="planned")
    monkeypatch.setattr(planning, "resolve_minimum", lambda *_: MinimumPlan(2, execution))


def test_driver_waits_for_the_workers_that_the_model_needs(
    runs: Runs, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `min: auto`. The memory of a worker is known once there is one."""
    needs_two_workers(monkeypatch)
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], slots=1)
    messages: list[str] = []

    def watch() -> None:
        messages.append(status(directory)["message"])
        if cluster.now > 100:
            cluster.slots = 3

    cluster.while_sleeping = watch
    make_driver(runs, directory, cluster, count=4, minimum="auto").run()
    assert cluster.sizes == [3]
    assert messages[0] == "1 of 4 workers are ready, 1 would be enough: waiting a little for the others"
    assert messages[-1].endswith("workers are ready, 2 are needed for the memory of the model")
    assert RunPlan.from_json(files.read_json(directory.plan) or {}).min_world_size == 2


def test_a_number_in_place_of_auto_is_kept(
    runs: Runs, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_two_workers(monkeypatch)
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], slots=1)
    make_driver(runs, directory, cluster, count=4, minimum=1).run()
    assert cluster.sizes == [1]


def test_fewer_workers_than_the_model_needs_are_a_job_error(
    runs: Runs, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_two_workers(monkeypatch)
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], slots=1)
    message = r"workers\.count: the model needs the memory of 2 workers, and 1 are asked for: raise it, or set"
    with pytest.raises(JobError, match=message):
        make_driver(runs, directory, cluster, count=1, minimum="auto").run()


def test_workers_whose_agents_are_starting_are_not_reported_missing(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], ready=0)

    def start() -> None:
        cluster.ready = 2

    cluster.while_sleeping = start
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert cluster.sizes == [2]
    assert events(driver, "waiting") == []
