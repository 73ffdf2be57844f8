"""Preflight as a whole: every check is made, shown as it comes, and remembered."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from spotune.cli.main import main
from spotune.errors import UsageError
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.control import CheckResult, Orders, Standing
from spotune_trainer.supervisor.preflight.checks import NOTICE_SECONDS, Preflight, refuse_missing_space
from tests.trainer.support.checkpoints import put_checkpoint
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import make_job, save_source


class Head:
    """A preflight whose clock goes on by a second at every look."""

    def __init__(self, root: Path, runs: Runs) -> None:
        self.directory = JobDirectory(root / "job")
        self.standing = Standing(Orders())
        self.preflight = Preflight(self.directory, self.standing, itertools.count().__next__)
        self.source = root / "model"
        self.job = make_job(self.source, dataset={"train": {"source": str(runs.shards("seq2seq"))}, "eval": None})

    def results(self) -> dict[str, CheckResult]:
        return {check.name: check for check in self.standing.checks}


@pytest.fixture
def head(tmp_path: Path, runs: Runs) -> Head:
    return Head(tmp_path, runs)


def test_failed_check_hides_no_other_and_is_made_again(head: Head) -> None:
    assert not head.preflight.passes(head.job)
    results = head.results()
    assert {name: result.status for name, result in results.items()} == {
        "storage-semantics": "passed",
        "model": "failed",
        "data": "passed",
        "storage-space": "failed",
        "commit-time": "failed",
    }
    assert head.preflight.failures() == (
        f"{results['model'].message}; the size of a checkpoint is not known before the model can be read"
    )
    save_source(head.source, "seq2seq")
    assert head.preflight.passes(head.job)
    assert head.preflight.failures() == ""
    assert head.standing.as_json()["preflight"]["passed"]
    assert {result.seconds for result in head.results().values()} == {1}


def test_check_that_is_made_again_shows_what_it_said_before(head: Head) -> None:
    shown: list[CheckResult] = []

    def look() -> str:
        shown.append(head.results()["volume"])
        if len(shown) == 1:
            raise OSError("the volume is away")
        return "the volume is there"

    preflight = Preflight(head.directory, head.standing, checks=lambda _job, _directory: {"volume": look})
    assert [preflight.passes(head.job) for _ in range(2)] == [False, True]
    assert [(result.status, result.message) for result in shown] == [
        ("running", ""),
        ("running", "the volume is away"),
    ]


def test_functions_that_judge_answers_are_looked_for_in_the_image(head: Head, tmp_path: Path) -> None:
    evaluation = {"generate": True, "metrics": ["loss", "json:dumps", "judges:length"]}
    job = make_job(tmp_path, training={"evaluation": evaluation})
    head.preflight.passes(job)
    result = head.results()["metrics"]
    assert result.status == "failed"
    assert result.message.startswith("spec.training.evaluation.metrics: judges:length: there is no module judges; ")
    evaluation["metrics"] = ["json:dumps"]
    head.preflight.passes(make_job(tmp_path, training={"evaluation": evaluation}))
    assert head.results()["metrics"] == CheckResult("metrics", "passed", "the image has json:dumps", 1)


def test_notice_is_the_pods(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    save_source(head.source, "seq2seq")
    monkeypatch.setenv(NOTICE_SECONDS, "25")
    head.preflight.passes(head.job)
    assert head.results()["commit-time"].message.endswith("and fits into the notice of 25 s")


def test_checks_that_a_newer_version_adds_are_made_although_there_are_checkpoints(head: Head) -> None:
    put_checkpoint(head.directory, 1, 1)
    recorded = [CheckResult("model", "passed", "of an earlier life", 1).as_json()]
    files.write_json(head.directory.preflight, {"time": 0, "checks": recorded})
    assert not head.preflight.passes(head.job), "the model is not there"
    save_source(head.source, "seq2seq")
    assert head.preflight.passes(head.job)
    head.preflight.record()
    head.source.rename(head.source.with_name("gone"))
    assert head.preflight.passes(head.job), "what passed is not looked at again"


def too_large_job(source: Path, runs: Runs) -> FinetuneJob:
    return make_job(
        save_source(source, "seq2seq"),
        dataset={"train": {"source": str(runs.shards("seq2seq"))}, "eval": None},
        checkpoint={"keep": 10**12},
        workers={"gpus": 0},
    )


def test_run_refuses_a_disk_that_is_too_small_and_leaves_nothing(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    job = too_large_job(tmp_path / "model", runs)
    file, directory = tmp_path / "job.yaml", tmp_path / "runs" / "tiny"
    file.write_text(job.model_dump_json(by_alias=True, exclude_unset=True))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--directory", str(directory)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{directory}: only " in said
    assert "give a --directory on a larger disk, or lower checkpoint.keep" in said
    assert not directory.parent.exists()


def test_run_that_has_begun_is_not_refused_a_disk_that_was_filled_since(
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
def test_model_whose_size_cannot_be_told_is_left_to_the_workers(config: object, head: Head) -> None:
    job = make_job(head.source, checkpoint={"keep": 10**12})
    head.source.mkdir()
    if config is Path:
        (head.source / "config.json").mkdir()
    elif config is not None:
        (head.source / "config.json").write_text(str(config))
    refuse_missing_space(head.directory, job)


def test_model_whose_size_is_known_is_refused(head: Head) -> None:
    save_source(head.source, "seq2seq")
    with pytest.raises(UsageError, match="are free, but"):
        refuse_missing_space(head.directory, make_job(head.source, checkpoint={"keep": 10**12}))
