"""A job that is changed while it runs: how it is trained is followed, what is trained stays as it was begun."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.driver.driver import Driver
from spotune_trainer.job_directory.job import is_trained, job_of, put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.control import Orders, Standing
from spotune_trainer.supervisor.job_watch import JobFile, put_changed_job
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import BROKEN, FIGURES, LOST, TRAINED, Group, World
from tests.trainer.support.tiny import make_job

# The driver


class Running:
    """A driver over a world, whose job is changed through the directory."""

    def __init__(self, runs: Runs, directory: JobDirectory, world: World, **sections: Any) -> None:
        self.runs = runs
        self.directory = directory
        self.sections: dict[str, Any] = {
            "workers": {"count": 2, "gpus": 0},
            "execution": {"microBatchSize": 4, "zeroStage": 1},
            **sections,
        }
        put_changed_job(directory, runs.job(**self.sections))
        self.driver = Driver(directory, runs.job(**self.sections), 1, world.surroundings())

    def change(self, **sections: Any) -> Callable[[], None]:
        merged = {name: {**self.sections.get(name, {}), **values} for name, values in sections.items()}
        job = self.runs.job(**{**self.sections, **merged})
        return lambda: put_changed_job(self.directory, job)


def test_next_group_has_the_workers_and_the_execution_of_the_changed_job(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(LOST, last=7), Group(TRAINED, last=10)], slots=4)
    running = Running(runs, directory, world)
    world.groups[0].before_end = running.change(workers={"count": 3}, execution={"microBatchSize": 2})
    running.driver.run()
    assert world.sizes == [2, 3]
    assert [task.plan["microBatchSize"] for task in world.tasks] == [4, 2]
    assert world.tasks[1].job["spec"]["workers"]["count"] == 3
    (changed,) = Ledger(directory).records("job-changed")
    assert changed["fields"] == ["spec.execution", "spec.workers"]


def test_fewer_workers_that_are_asked_for_while_waiting_are_not_waited_for(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(TRAINED, last=10)], slots=1)
    running = Running(runs, directory, world, workers={"count": 4, "min": 2, "gpus": 0})
    world.while_sleeping = running.change(workers={"count": 1, "min": 1})
    running.driver.run()
    assert world.sizes == [1]


def test_other_meaning_is_not_taken_in_and_said(
    runs: Runs, directory: JobDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    world = World([Group(LOST, last=7), Group(TRAINED, last=10)])
    running = Running(runs, directory, world)
    world.groups[0].before_end = running.change(training={"learningRate": 0.5}, workers={"count": 1})
    running.driver.run()
    assert world.sizes == [2, 2]
    assert world.tasks[1].job == world.tasks[0].job
    assert [record.message for record in caplog.records if "learningRate" in record.message] == [
        "spec.training.learningRate changed in job.json: going on with what was begun"
    ]


def test_retry_policy_is_the_one_by_now(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(BROKEN)] * 3)
    running = Running(runs, directory, world, retry={"appFailureLimit": 9, "backoff": {"initial": "1s", "max": "1s"}})
    world.groups[2] = Group(BROKEN, before_end=running.change(retry={"appFailureLimit": 1}))
    with pytest.raises(JobError, match="failed once without a new step"):
        running.driver.run()
    assert len(world.tasks) == 3


def test_change_of_the_job_gives_what_failed_before_a_new_chance(runs: Runs, directory: JobDirectory) -> None:
    retry = {"appFailureLimit": 2, "backoff": {"initial": "1s", "max": "1s"}}
    running = Running(runs, directory, World([Group(BROKEN)] * 2), retry=retry)
    with pytest.raises(JobError):
        running.driver.run()
    running.change(checkpoint={"keep": 7})()
    world = World([Group(BROKEN), Group(TRAINED, last=10)])
    job = job_of(directory)
    assert job is not None
    Driver(directory, job, 2, world.surroundings()).run()
    assert files.read_json(directory.status)["restarts"]["appError"] == 3  # type: ignore[index]


def test_training_that_was_made_longer_meanwhile_goes_on(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(TRAINED, last=10, commits=[10]), Group(TRAINED, last=20)])
    running = Running(runs, directory, world)
    world.groups[0].before_end = running.change(training={"epochs": 4})
    running.driver.run()
    assert [task.job["spec"]["training"]["epochs"] for task in world.tasks] == [2, 4]
    assert world.tasks[1].restore == "step-00000010.gen-1"
    result = files.read_json(directory.result)
    assert (result["epochs"], result["maxSteps"]) == (4, None)  # type: ignore[index]


def test_result_counts_for_its_own_length_only(runs: Runs, directory: JobDirectory) -> None:
    two, four = runs.job(training={"epochs": 2}), runs.job(training={"epochs": 4})
    put_job(directory, two)
    assert not is_trained(directory, two)
    files.write_json(directory.result, FIGURES)
    assert (is_trained(directory, two), is_trained(directory, four)) == (True, False), "of an earlier version"
    files.write_json(directory.result, {**FIGURES, "epochs": 4.0, "maxSteps": None})
    assert (is_trained(directory, two), is_trained(directory, four)) == (False, True)


# The job file


class Mounted:
    """A job file, read by a supervisor whose clock moves on at every look."""

    def __init__(self, directory: JobDirectory) -> None:
        self.directory = directory
        self.path = directory.root.with_name("job.yaml")
        self.said: list[str] = []
        self.standing = Standing(Orders())
        self.now = 0.0
        self.file = JobFile(self.path, directory, self.standing, self.said.append, lambda: self.now)

    def write(self, **sections: Any) -> FinetuneJob:
        job = make_job("/model", **sections)
        self.path.write_text(job.model_dump_json(exclude_unset=True))
        self.now += 10
        return job

    def begin(self, **sections: Any) -> FinetuneJob:
        job = self.write(**sections)
        assert self.file.read() == job
        put_changed_job(self.directory, job)
        return job

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


@pytest.fixture
def mounted(directory: JobDirectory) -> Mounted:
    return Mounted(directory)


def test_change_of_how_is_put_into_the_directory_at_once(mounted: Mounted) -> None:
    mounted.begin(workers={"count": 2})
    assert mounted.standing.job == mounted.digest
    changed = mounted.write(workers={"count": 3}, retry={"appFailureLimit": 7})
    assert mounted.file.current() == changed == job_of(mounted.directory)
    assert mounted.standing.job == mounted.digest
    (event,) = Ledger(mounted.directory).records("job-changed")
    assert event["fields"] == ["spec.workers", "spec.retry"]


def test_file_is_looked_at_every_few_seconds_only(mounted: Mounted) -> None:
    earlier = mounted.begin(workers={"count": 2})
    assert mounted.file.current() == earlier
    later = mounted.write(workers={"count": 3})
    mounted.now -= 9
    assert mounted.file.current() == earlier
    mounted.now += 1
    assert mounted.file.current() == later


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("spec: [", "job.yaml"),
        (make_job("/model", training={"seed": 8}).model_dump_json(exclude_unset=True), "spec.training.seed changed"),
    ],
)
def test_what_cannot_be_taken_in_is_said_once_until_it_is_mended(mounted: Mounted, text: str, reason: str) -> None:
    earlier = mounted.begin(workers={"count": 2})
    digest = mounted.digest
    mounted.path.write_text(text)
    for _ in range(3):
        mounted.now += 10
        assert mounted.file.current() == earlier == job_of(mounted.directory)
    assert mounted.standing.job == digest
    assert reason in mounted.standing.as_json()["message"]
    assert len(mounted.said) == 1
    mended = mounted.write(workers={"count": 4})
    assert mounted.file.current() == mended
    assert mounted.standing.job == mounted.digest
    assert mounted.standing.as_json()["message"] == ""


def test_job_that_means_the_same_is_no_change(mounted: Mounted) -> None:
    mounted.begin(workers={"count": 2})
    mounted.path.write_text(mounted.path.read_text() + "\n")
    mounted.now += 10
    mounted.file.current()
    assert mounted.standing.job == mounted.digest
    assert Ledger(mounted.directory).records("job-changed") == []


def test_file_that_is_refused_at_the_start_is_the_one_that_the_refusal_is_about(mounted: Mounted) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        mounted.file.read()
    mounted.path.write_text("kind: Pod")
    with pytest.raises(JobError, match="a job file says kind: FinetuneJob"):
        mounted.file.read()
    assert mounted.standing.job == mounted.digest
    mounted.now += 10
    assert not mounted.file.has_changed()
    mounted.write()
    assert mounted.file.has_changed()
    mounted.path.unlink()
    mounted.now += 10
    assert not mounted.file.has_changed(), "the kubelet is about to put another one there"
