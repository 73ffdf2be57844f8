"""The preflight as a whole: all checks run, each result is shown at once, and passed checks are recorded."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from spotune.cli.main import main
from spotune.errors import UsageError
from spotune.job import FinetuneJob
from spotune.job_file.load import replace_fields
from spotune.plan.known_models import KNOWN_CONFIGS
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.control import ControlSignals, SupervisorStatus
from spotune_trainer.supervisor.preflight.checks import NOTICE_SECONDS, Check, checks_of, refuse_insufficient_space
from spotune_trainer.supervisor.preflight.result import CheckResult
from spotune_trainer.supervisor.preflight.runner import Preflight
from tests.trainer.support.checkpoints import commit_checkpoint
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import make_job, save_source
from tests.trainer.training_functions.ranks import function_job


class Head:
    """A preflight whose clock advances by a second at each reading."""

    def __init__(self, root: Path, runs: Runs) -> None:
        self.directory = JobDirectory(root / "job")
        self.status = SupervisorStatus(ControlSignals())
        self.preflight = Preflight(self.directory, self.status.preflight, itertools.count().__next__)
        self.source = root / "model"
        self.job = make_job(self.source, dataset={"train": {"source": str(runs.shards("seq2seq"))}, "eval": None})

    def results(self) -> dict[str, CheckResult]:
        return {check.name: check for check in self.status.preflight.checks}


@pytest.fixture
def head(tmp_path: Path, runs: Runs) -> Head:
    return Head(tmp_path, runs)


def test_failed_check_is_repeated_and_skips_only_checks_that_need_it(head: Head) -> None:
    assert not head.preflight.passes(head.job)
    results = head.results()
    assert {name: result.status for name, result in results.items()} == {
        "storage-semantics": "passed",
        "model": "failed",
        "data": "passed",
        "storage-space": "skipped",
        "commit-time": "skipped",
    }
    assert head.preflight.failures() == results["model"].message, "the cause alone"
    for name in ("storage-space", "commit-time"):
        assert results[name] == CheckResult(name, "skipped", "waits for the check model")
    assert not head.status.as_json()["preflight"]["passed"]
    save_source(head.source, "seq2seq")
    assert head.preflight.passes(head.job)
    assert head.preflight.failures() == ""
    assert head.status.as_json()["preflight"]["passed"]
    assert {result.seconds for result in head.results().values()} == {1}


def test_repeated_check_shows_its_last_message_while_it_runs(head: Head) -> None:
    shown: list[CheckResult] = []

    def check() -> str:
        shown.append(head.results()["volume"])
        if len(shown) == 1:
            raise OSError("the volume is away")
        return "the volume is there"

    preflight = Preflight(
        head.directory, head.status.preflight, checks=lambda _job, _directory: {"volume": Check(check)}
    )
    assert [preflight.passes(head.job) for _ in range(2)] == [False, True]
    assert [(result.status, result.message) for result in shown] == [
        ("running", ""),
        ("running", "the volume is away"),
    ]


def test_metric_functions_have_to_be_in_the_image(head: Head, tmp_path: Path) -> None:
    evaluation = {"generate": True, "metrics": ["loss", "json:dumps", "judges:length"]}
    job = make_job(tmp_path, training={"evaluation": evaluation})
    head.preflight.passes(job)
    result = head.results()["metrics"]
    assert result.status == "failed"
    assert result.message.startswith("spec.training.evaluation.metrics: judges:length: there is no module judges; ")
    evaluation["metrics"] = ["json:dumps"]
    head.preflight.passes(make_job(tmp_path, training={"evaluation": evaluation}))
    assert head.results()["metrics"] == CheckResult("metrics", "passed", "the image has json:dumps", 1)


def test_skipped_checks_wait_for_the_first_failure_and_run_once_it_is_fixed(head: Head) -> None:
    def check_volume() -> str:
        shown.append(head.status.preflight.checks)
        if len(shown) == 1:
            raise OSError("the volume is away")
        return "the volume is there"

    def measure() -> str:
        shown.append(head.status.preflight.checks)
        return "the volume is fast"

    shown: list[tuple[CheckResult, ...]] = []
    checks = {
        "volume": Check(check_volume),
        "speed": Check(measure, needs=("volume",)),
        "deadline": Check(lambda: "the volume is fast enough", needs=("volume", "speed")),
        "data": Check(lambda: "the data is there"),
    }
    preflight = Preflight(head.directory, head.status.preflight, checks=lambda _job, _directory: checks)
    assert not preflight.passes(head.job)
    assert [(result.name, result.status, result.message) for result in head.status.preflight.checks] == [
        ("volume", "failed", "the volume is away"),
        ("speed", "skipped", "waits for the check volume"),
        ("deadline", "skipped", "waits for the check volume"),
        ("data", "passed", "the data is there"),
    ]
    assert preflight.failures() == "the volume is away"
    assert preflight.passes(head.job)
    assert [result.status for result in head.status.preflight.checks] == ["passed"] * 4
    assert shown[-1][1] == CheckResult("speed", "running"), "without the message of the skipped check"


def test_check_that_waits_for_a_skipped_one_names_it(head: Head) -> None:
    def missing() -> str:
        raise OSError("the model is away")

    checks = {
        "model": Check(missing),
        "size": Check(lambda: "12 MB", needs=("model",)),
        "space": Check(lambda: "free", needs=("size",)),
    }
    preflight = Preflight(head.directory, head.status.preflight, checks=lambda _job, _directory: checks)
    assert not preflight.passes(head.job)
    assert head.results()["space"] == CheckResult("space", "skipped", "waits for the check size")


def test_read_only_volume_is_one_failure(head: Head, tmp_path: Path) -> None:
    save_source(head.source, "seq2seq")
    preflight = Preflight(JobDirectory(Path("/sys/job")), head.status.preflight)
    assert not preflight.passes(head.job)
    results = head.results()
    assert results["storage-semantics"].status == "failed"
    assert results["commit-time"].message == "waits for the check storage-semantics"
    assert "storage-semantics" not in preflight.failures()


def test_failure_of_a_check_that_a_changed_job_no_longer_has_is_dropped(head: Head) -> None:
    save_source(head.source, "seq2seq")
    evaluation = {"generate": True, "metrics": ["judges:length"]}
    assert not head.preflight.passes(make_job(head.source, training={"evaluation": evaluation}))
    assert head.results()["metrics"].status == "failed"
    assert head.preflight.passes(head.job)
    assert "metrics" not in head.results()


def test_notice_is_taken_from_the_pods_environment(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    save_source(head.source, "seq2seq")
    monkeypatch.setenv(NOTICE_SECONDS, "25")
    head.preflight.passes(head.job)
    assert head.results()["commit-time"].message.endswith("and fits into the notice of 25 s")


def test_new_check_of_a_newer_version_runs_although_there_are_checkpoints(head: Head) -> None:
    commit_checkpoint(head.directory, 1, 1)
    recorded = [CheckResult("model", "passed", "of an earlier life", 1).as_json()]
    files.write_json(head.directory.preflight, {"time": 0, "checks": recorded})
    assert not head.preflight.passes(head.job), "the model is not there"
    save_source(head.source, "seq2seq")
    assert head.preflight.passes(head.job)
    head.preflight.record()
    head.source.rename(head.source.with_name("gone"))
    assert head.preflight.passes(head.job), "checks that passed are not repeated"


def too_large_job(source: Path, runs: Runs) -> FinetuneJob:
    return make_job(
        save_source(source, "seq2seq"),
        dataset={"train": {"source": str(runs.shards("seq2seq"))}, "eval": None},
        checkpoint={"keep": 10**12},
        workers={"gpus": 0},
    )


def test_run_refuses_too_small_a_disk_and_writes_nothing(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    job = too_large_job(tmp_path / "model", runs)
    file, directory = tmp_path / "job.yaml", tmp_path / "runs" / "tiny"
    file.write_text(job.model_dump_json(by_alias=True, exclude_unset=True))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--directory", str(directory)])
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert f"{directory}: only " in stderr
    assert "give a --directory on a larger disk, or lower checkpoint.keep" in stderr
    assert not directory.parent.exists()


def test_started_run_is_not_refused_after_the_disk_was_filled(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = too_large_job(tmp_path / "model", runs)
    file, directory = tmp_path / "job.yaml", JobDirectory(tmp_path / "runs" / "tiny")
    file.write_text(job.model_dump_json(by_alias=True, exclude_unset=True))
    trained: list[JobDirectory] = []

    def train(place: JobDirectory, *_: object, **__: object) -> None:
        trained.append(place)
        files.write_json(place.result, {"steps": 1, "trainLoss": 0.5})

    monkeypatch.setattr("spotune_trainer.cli.run._train", train)
    directory.logs.mkdir(parents=True)
    files.write_json(directory.job, job.model_dump(mode="json", by_alias=True, exclude_unset=True))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--directory", str(directory.root)])
    assert ended.value.code == 0
    assert trained == [directory]


@pytest.mark.parametrize("config", [None, "{", '{"model_type": "mamba"}', Path])
def test_model_of_unreadable_size_is_left_to_the_workers(config: object, head: Head) -> None:
    job = make_job(head.source, checkpoint={"keep": 10**12})
    head.source.mkdir()
    if config is Path:
        (head.source / "config.json").mkdir()
    elif config is not None:
        (head.source / "config.json").write_text(str(config))
    refuse_insufficient_space(head.directory, job)


def test_model_of_known_size_is_refused(head: Head) -> None:
    save_source(head.source, "seq2seq")
    with pytest.raises(UsageError, match="are free, but"):
        refuse_insufficient_space(head.directory, make_job(head.source, checkpoint={"keep": 10**12}))


def limited(head: Head, memory: str, **workers: Any) -> FinetuneJob:
    """The head's job, with CPU workers of so much memory, and its model, which is a T5 of 3 billion parameters."""
    save_source(head.source, "seq2seq")
    config = {**(files.read_json(head.source / "config.json") or {}), **KNOWN_CONFIGS["google-t5/t5-3b"]}
    files.write_json(head.source / "config.json", config)
    workers = {"count": 8, "gpus": 0, "resources": {"limits": {"memory": memory}}} | workers
    return replace_fields(head.job, {f"spec.workers.{name}": value for name, value in workers.items()})


def test_workers_that_are_too_small_for_the_model_are_refused_before_there_is_one(head: Head) -> None:
    assert not head.preflight.passes(limited(head, "8Gi"))
    failed = head.results()["worker-memory"]
    assert failed.status == "failed"
    assert "does not fit on 8 workers" in failed.message
    assert failed.message.endswith("Raise spec.workers.resources.limits.memory (8Gi) or spec.workers.count.")


def test_smallest_number_of_workers_is_shown(head: Head) -> None:
    head.preflight.passes(limited(head, "32Gi"))
    passed = head.results()["worker-memory"]
    assert passed.status == "passed"
    assert re.match(r"the model fits on [2-4] of 8 workers: ZeRO stage", passed.message), passed.message
    head.preflight.passes(limited(head, "32Gi", min=1))
    assert head.results()["worker-memory"].message.endswith("(32Gi) or spec.workers.min.")


def test_memory_of_workers_with_gpus_is_not_checked(head: Head) -> None:
    head.preflight.passes(limited(head, "8Gi", gpus=1))
    assert "worker-memory" not in head.results()


def test_code_of_the_user_in_a_bucket_needs_the_bucket_and_no_file_system(tmp_path: Path) -> None:
    checks = checks_of(function_job("adds_up", {}), JobDirectory(tmp_path), "s3://bucket/job")
    assert list(checks) == ["bucket", "user-code"]
    assert checks["user-code"].run().endswith("has functions:adds_up")
