"""The driver of a run that stopped early: the run is trained, and result and status say why it ended."""

from __future__ import annotations

from spotune_trainer import files
from spotune_trainer.driver.driver import Driver
from spotune_trainer.job_directory.job import is_trained
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.worker_group.result import Trained
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import SUMMARY, ScriptedGroup, SimulatedCluster


def test_run_that_stopped_early_is_trained_and_says_why(runs: Runs, directory: JobDirectory) -> None:
    reason, problem = "stopped early after step 10: ...", "the checkpoint of step 8 is damaged: ..."
    best = {"step": 8, "metric": "loss", "value": 1.25}
    summary = {**SUMMARY, "best": best, "stoppedEarly": reason, "exportProblem": problem, "exportStep": 10}
    cluster = SimulatedCluster([ScriptedGroup(Trained(summary), last_step=10, commits=[10])])
    job = runs.job(workers={"count": 2, "gpus": 0}, execution={"microBatchSize": 4, "zeroStage": 1})
    Driver(directory, job, 1, cluster.dependencies()).run()
    assert (files.read_json(directory.result) or {}).items() >= summary.items()
    assert (files.read_json(directory.status) or {})["message"] == f"{reason}; {problem}"
    assert is_trained(directory, job), "the same job does not train further"
    assert not is_trained(directory, runs.job(training={"epochs": 5}))
