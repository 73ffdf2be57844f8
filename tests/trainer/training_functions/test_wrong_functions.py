"""What is wrong in code of the user, from the ranks to the sentence that a user reads in the job's conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotune.custom_resource import Condition
from spotune.errors import JobError, SupersededError
from spotune.job import FinetuneJob
from spotune_trainer.driver.driver import Driver
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.failures import describe
from spotune_trainer.training.task import RankResult, WorkerTask
from spotune_trainer.worker_group.result import Failed, GroupResult, Superseded, classify_exit
from tests.operator.support.scenarios import training_scenario
from tests.trainer.supervisor.test_daemon import Container
from tests.trainer.support.drivers import events, status
from tests.trainer.support.simulated_cluster import ScriptedGroup, SimulatedCluster
from tests.trainer.training_functions.ranks import FOLDER, command_job, function_job, run_generation, run_superseded

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
NO_PROGRAM = "training.command: there is no program torchrnu on the path: correct the name, or set training.code to the"
NO_SCRIPT = "training.command: there is no script missing.py in "
NO_OUTPUT = (
    "training.command ended with exit status 0 and has left no model: write it to the folder SPOTUNE_OUTPUT_DIR, or "
    "call spotune_train.checkpoint.save"
)
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
    assert failed_condition(directory, job).message.startswith(BEFORE + expected)


@pytest.mark.parametrize(
    ("command", "expected"),
    [(("torchrnu", "train.py"), NO_PROGRAM), (("python", "missing.py"), NO_SCRIPT), (("true",), NO_OUTPUT)],
)
def test_what_is_wrong_with_a_command_is_the_message_of_the_failed_condition(
    directory: JobDirectory, command: tuple[str, ...], expected: str
) -> None:
    job = command_job(*command, code=FOLDER, retry={"appFailureLimit": 2})
    assert failed_condition(directory, job, world_size=1).message.startswith(BEFORE + expected)


def failed_condition(directory: JobDirectory, job: FinetuneJob, world_size: int = 2) -> Condition:
    """The condition `Failed` of a job whose code is wrong, from the errors of its ranks on."""
    task, errors = run_generation(directory, job, world_size)
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
    return condition


def test_a_group_that_saves_after_a_later_one_has_started_is_named_in_the_status(directory: JobDirectory) -> None:
    """The job has not failed: the later group trains, and this supervisor waits until that one is silent."""
    job = function_job("saves_until_superseded", {}, module="library_functions")
    errors = run_superseded(directory, job)
    task = WorkerTask(str(directory.root), 1, None, {}, {})
    result = result_of(task, errors)
    message = "generation 1 was superseded by a later one of this job; nothing was saved"
    assert result == Superseded(message)

    driver = Driver(directory, job, 1, SimulatedCluster([ScriptedGroup(result)]).dependencies())
    with pytest.raises(SupersededError, match=message):
        driver.run()

    shown: list[dict[str, Any]] = []
    container = Container(directory, SupersededError(status(directory)["message"]))
    container.while_sleeping = lambda: shown.append(container.shown())
    container.run()
    assert shown[0]["state"] == "waiting"
    scenario = training_scenario()
    scenario.supervisor_reports("Training", shown[0]["state"], why=shown[0]["message"], ageSeconds=45.0)
    scenario.decide()
    training, ready = scenario.condition("Training"), scenario.condition("Ready")
    assert (training.status, training.reason, ready.status) == ("False", "Recovering", "False")
    assert training.message == ready.message == f"{message}: waiting until it has been silent for 180 s"
    assert not scenario.is_true("Failed")
