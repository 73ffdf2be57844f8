"""What is wrong in a training function, from the ranks to the sentence that a user reads in the job's conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotune.errors import JobError, SupersededError
from spotune_trainer.driver.driver import Driver
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.failures import describe
from spotune_trainer.training.task import RankResult, WorkerTask
from spotune_trainer.worker_group.result import Failed, GroupResult, Superseded, classify_exit
from tests.operator.support.scenarios import training_scenario
from tests.trainer.support.drivers import events, status
from tests.trainer.support.simulated_cluster import ScriptedGroup, SimulatedCluster
from tests.trainer.training_functions.ranks import function_job, run_generation, run_superseded

pytestmark = pytest.mark.slow

BEFORE = "the model, data or code of the job failed 2 times without a new step (step 0): rank 0: "
NO_MODULE = (
    "training.function: missing_module:main cannot be imported (ModuleNotFoundError: No module named "
    "'missing_module'); correct the name, set training.code to the folder of the module, or install the module"
)
NO_NAME = (
    "training.function: functions:is_missing cannot be imported (AttributeError: module 'functions' has no attribute "
    "'is_missing'); correct the name,"
)
NO_MODEL = (
    "training.function returned and has saved no checkpoint, so there is no model: pass one to ray.train.report, or "
    "call spotune_train.checkpoint.save, before it returns"
)
TWICE = (
    "training.function reported step 3 after step 3: report each step once, in ascending order, and continue after the "
    "checkpoint's step"
)
BACKWARDS = "training.function reported step 2 after step 3: report each step once, in ascending order, and continue"
SAVED_BACKWARDS = "training.function saved step 2 after step 3: save the state of the last step"


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "run")


def result_of(task: WorkerTask, errors: list[Any]) -> GroupResult:
    """The result of a group whose ranks have raised these errors, as the driver learns it from their agents."""
    results = [RankResult(rank, 1, failure=describe(rank, error)) for rank, error in enumerate(errors)]
    return classify_exit(task.logs, results, {}, "")


@pytest.mark.parametrize(
    ("function", "config", "expected"),
    [
        ("missing_module:main", {}, NO_MODULE),
        ("functions:is_missing", {}, NO_NAME),
        ("functions:reports_nothing", {}, NO_MODEL),
        ("library_functions:reports_backwards", {"step": 3}, TWICE),
        ("library_functions:reports_backwards", {"step": 2}, BACKWARDS),
        ("library_functions:saves_backwards", {}, SAVED_BACKWARDS),
    ],
)
def test_what_is_wrong_is_the_message_of_the_failed_condition(
    directory: JobDirectory, function: str, config: dict[str, Any], expected: str
) -> None:
    module, _, name = function.partition(":")
    job = function_job(name, config, module=module, retry={"appFailureLimit": 2})
    task, errors = run_generation(directory, job)
    result = result_of(task, errors)
    assert isinstance(result, Failed)

    cluster = SimulatedCluster([ScriptedGroup(result)] * 2)
    driver = Driver(directory, job, 1, cluster.dependencies())
    with pytest.raises(JobError) as failed:
        driver.run()
    assert [failure["cause"] for failure in events(driver, "failure")] == ["appError"] * 2
    written = status(directory)
    assert written["phase"] == "Failed"
    assert written["message"] == str(failed.value)

    scenario = training_scenario()
    scenario.supervisor_reports("Failed", "failed", why=str(failed.value))
    scenario.decide()
    condition = scenario.condition("Failed")
    assert (condition.status, condition.reason) == ("True", "JobError")
    assert condition.message.startswith(BEFORE + expected)


def test_a_function_that_saves_for_two_groups_is_told_which_one_counts(directory: JobDirectory) -> None:
    job = function_job("saves_until_superseded", {}, module="library_functions")
    errors = run_superseded(directory, job)
    task = WorkerTask(str(directory.root), 1, None, {}, {})
    result = result_of(task, errors)
    message = "generation 1 was superseded by a later one of this job; nothing was saved"
    assert result == Superseded(message)

    driver = Driver(directory, job, 1, SimulatedCluster([ScriptedGroup(result)]).dependencies())
    with pytest.raises(SupersededError, match=message):
        driver.run()
