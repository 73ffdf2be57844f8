"""A job that changes while it runs: changes of how it is trained apply, and changes of what is trained do not."""

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
from spotune_trainer.supervisor.control import ControlSignals, SupervisorStatus
from spotune_trainer.supervisor.job_watch import JobFile, put_changed_job
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import BROKEN, LOST, SUMMARY, TRAINED, ScriptedGroup, SimulatedCluster
from tests.trainer.support.tiny import make_job

# The driver


class Running:
    """A driver on a simulated cluster, whose job is changed in its directory."""

    def __init__(self, runs: Runs, directory: JobDirectory, cluster: SimulatedCluster, **sections: Any) -> None:
        self.runs = runs
        self.directory = directory
        self.sections: dict[str, Any] = {
            "workers": {"count": 2, "gpus": 0},
            "execution": {"microBatchSize": 4, "zeroStage": 1},
            **sections,
        }
        put_changed_job(directory, runs.job(**self.sections))
        self.driver = Driver(directory, runs.job(**self.sections), 1, cluster.dependencies())

    def change(self, **sections: Any) -> Callable[[], None]:
        merged = {name: {**self.sections.get(name, {}), **values} for name, values in sections.items()}
        job = self.runs.job(**{**self.sections, **merged})
        return lambda: put_changed_job(self.directory, job)


def test_next_group_uses_the_workers_and_execution_of_the_changed_job(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(LOST, last_step=7), ScriptedGroup(TRAINED, last_step=10)], slots=4)
    running = Running(runs, directory, cluster)
    cluster.groups[0].before_exit = running.change(workers={"count": 3}, execution={"microBatchSize": 2})
    running.driver.run()
    assert cluster.sizes == [2, 3]
    assert [task.plan["microBatchSize"] for task in cluster.tasks] == [4, 2]
    assert cluster.tasks[1].job["spec"]["workers"]["count"] == 3
    (changed,) = Ledger(directory).records("job-changed")
    assert changed["fields"] == ["spec.execution", "spec.workers"]


def test_reducing_the_workers_ends_the_wait_for_them(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], slots=1)
    running = Running(runs, directory, cluster, workers={"count": 4, "min": 2, "gpus": 0})
    cluster.while_sleeping = running.change(workers={"count": 1, "min": 1})
    running.driver.run()
    assert cluster.sizes == [1]


def test_changed_fingerprint_is_ignored_and_reported(
    runs: Runs, directory: JobDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = SimulatedCluster([ScriptedGroup(LOST, last_step=7), ScriptedGroup(TRAINED, last_step=10)])
    running = Running(runs, directory, cluster)
    cluster.groups[0].before_exit = running.change(training={"learningRate": 0.5}, workers={"count": 1})
    running.driver.run()
    assert cluster.sizes == [2, 2]
    assert cluster.tasks[1].job == cluster.tasks[0].job
    assert [record.message for record in caplog.records if "learningRate" in record.message] == [
        "spec.training.learningRate changed in job.json: ignored, the run continues with the previous job"
    ]


def test_current_retry_policy_is_used(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(BROKEN)] * 3)
    running = Running(runs, directory, cluster, retry={"appFailureLimit": 9, "backoff": {"initial": "1s", "max": "1s"}})
    cluster.groups[2] = ScriptedGroup(BROKEN, before_exit=running.change(retry={"appFailureLimit": 1}))
    with pytest.raises(JobError, match="failed once without a new step"):
        running.driver.run()
    assert len(cluster.tasks) == 3


def test_changed_job_resets_the_count_of_failures(runs: Runs, directory: JobDirectory) -> None:
    retry = {"appFailureLimit": 2, "backoff": {"initial": "1s", "max": "1s"}}
    running = Running(runs, directory, SimulatedCluster([ScriptedGroup(BROKEN)] * 2), retry=retry)
    with pytest.raises(JobError):
        running.driver.run()
    running.change(checkpoint={"keep": 7})()
    cluster = SimulatedCluster([ScriptedGroup(BROKEN), ScriptedGroup(TRAINED, last_step=10)])
    job = job_of(directory)
    assert job is not None
    Driver(directory, job, 2, cluster.dependencies()).run()
    assert files.read_json(directory.status)["restarts"]["appError"] == 3  # type: ignore[index]


def test_training_extended_during_a_run_continues(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster(
        [ScriptedGroup(TRAINED, last_step=10, commits=[10]), ScriptedGroup(TRAINED, last_step=20)]
    )
    running = Running(runs, directory, cluster)
    cluster.groups[0].before_exit = running.change(training={"epochs": 4})
    running.driver.run()
    assert [task.job["spec"]["training"]["epochs"] for task in cluster.tasks] == [2, 4]
    assert cluster.tasks[1].restore == "step-00000010.gen-1"
    result = files.read_json(directory.result)
    assert (result["epochs"], result["maxSteps"]) == (4, None)  # type: ignore[index]


def test_result_counts_for_its_own_length_only(runs: Runs, directory: JobDirectory) -> None:
    two, four = runs.job(training={"epochs": 2}), runs.job(training={"epochs": 4})
    put_job(directory, two)
    assert not is_trained(directory, two)
    files.write_json(directory.result, SUMMARY)
    assert (is_trained(directory, two), is_trained(directory, four)) == (True, False), "of an earlier version"
    files.write_json(directory.result, {**SUMMARY, "epochs": 4.0, "maxSteps": None})
    assert (is_trained(directory, two), is_trained(directory, four)) == (False, True)


# The job file


class Mounted:
    """A job file, and a supervisor that reads it on an artificial clock."""

    def __init__(self, directory: JobDirectory) -> None:
        self.directory = directory
        self.path = directory.root.with_name("job.yaml")
        self.lines: list[str] = []
        self.status = SupervisorStatus(ControlSignals())
        self.now = 0.0
        self.file = JobFile(self.path, directory, self.status, self.lines.append, lambda: self.now)

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


def test_accepted_change_is_written_to_job_json_at_once(mounted: Mounted) -> None:
    mounted.begin(workers={"count": 2})
    assert mounted.status.job == mounted.digest
    changed = mounted.write(workers={"count": 3}, retry={"appFailureLimit": 7})
    assert mounted.file.current() == changed == job_of(mounted.directory)
    assert mounted.status.job == mounted.digest
    (event,) = Ledger(mounted.directory).records("job-changed")
    assert event["fields"] == ["spec.workers", "spec.retry"]


def test_file_is_polled_every_few_seconds_only(mounted: Mounted) -> None:
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
def test_unacceptable_change_is_reported_once_until_it_is_fixed(mounted: Mounted, text: str, reason: str) -> None:
    earlier = mounted.begin(workers={"count": 2})
    digest = mounted.digest
    mounted.path.write_text(text)
    for _ in range(3):
        mounted.now += 10
        assert mounted.file.current() == earlier == job_of(mounted.directory)
    assert mounted.status.job == digest
    assert reason in mounted.status.as_json()["message"]
    assert len(mounted.lines) == 1
    fixed = mounted.write(workers={"count": 4})
    assert mounted.file.current() == fixed
    assert mounted.status.job == mounted.digest
    assert mounted.status.as_json()["message"] == ""


def test_equal_job_is_no_change(mounted: Mounted) -> None:
    mounted.begin(workers={"count": 2})
    mounted.path.write_text(mounted.path.read_text() + "\n")
    mounted.now += 10
    mounted.file.current()
    assert mounted.status.job == mounted.digest
    assert Ledger(mounted.directory).records("job-changed") == []


def test_status_names_the_content_of_an_invalid_file(mounted: Mounted) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        mounted.file.read()
    mounted.path.write_text("kind: Pod")
    with pytest.raises(JobError, match="expected kind: FinetuneJob"):
        mounted.file.read()
    assert mounted.status.job == mounted.digest
    mounted.now += 10
    assert not mounted.file.has_changed()
    mounted.write()
    assert mounted.file.has_changed()
    mounted.path.unlink()
    mounted.now += 10
    assert not mounted.file.has_changed(), "the kubelet is about to write a new one"
