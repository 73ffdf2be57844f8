"""What the driver does with the sources of a mixture before it waits for workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import JobError, StoppedError
from spotune_trainer import files
from spotune_trainer.driver.driver import Driver
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.result import Stopped
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import TRAINED, ScriptedGroup, SimulatedCluster


def test_raw_data_of_each_source_of_a_mixture_is_prepared_before_waiting_for_workers(
    runs: Runs, directory: JobDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="spotune.driver")
    mixture: list[dict[str, Any]] = [{"name": "shards", "train": {"source": str(runs.shards("seq2seq"))}}]
    for name in ("sql", "chat"):
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text(f'{{"question": "how many {name} are there ?", "answer": "SELECT 1"}}\n' * 3)
        mixture.append({"name": name, "prepare": {"source": str(rows)}})
    format_ = {"prompt": "{question}", "completion": "{answer}"}
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10, commits=[10])])
    job = runs.job(dataset={"train": None, "mixture": mixture, **format_}, workers={"count": 2, "gpus": 0})
    Driver(directory, job, 1, cluster.dependencies()).run()
    assert cluster.sizes == [2]
    for name in ("sql", "chat"):
        assert (directory.data / "train" / name / "index.json").exists()
    assert [message for message in caplog.messages if message.startswith("source ")] == [
        "source shards: 92.59% of the samples of the run: 150, 2.00 passes over 75",
        "source sql: 3.70% of the samples of the run: 6, 2.00 passes over 3",
        "source chat: 3.70% of the samples of the run: 6, 2.00 passes over 3",
    ]
    plan = files.read_json(directory.plan)
    assert plan is not None
    assert list(plan["data"]) == ["mixture.shards.train", "mixture.sql.train", "mixture.chat.train"]


def test_what_is_left_out_of_raw_data_is_recorded_and_shown(
    runs: Runs, directory: JobDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="spotune.driver")
    rows = tmp_path / "rows.jsonl"
    good = '{"question": "how many ?", "answer": "SELECT 1"}\n'
    rows.write_text(good * 20 + '{"question": "' + "why " * 99 + '", "answer": "SELECT 1"}\n' + good * 19)
    dataset = {
        "train": None, "prepare": {"source": str(rows)}, "prompt": "{question}", "completion": "{answer}",
        "maxLength": 32,
    }  # fmt: skip
    first = SimulatedCluster([ScriptedGroup(Stopped(), last_step=5, commits=[5])])
    job = runs.job("causal", dataset=dataset, workers={"count": 2, "gpus": 0})
    with pytest.raises(JobError, match=r"rows\.jsonl:21: nothing to learn.*raise dataset\.maxSkipped"):
        Driver(directory, job, 1, first.dependencies()).run()
    job = runs.job("causal", dataset={**dataset, "maxSkipped": 1}, workers={"count": 2, "gpus": 0})
    with pytest.raises(StoppedError):
        Driver(directory, job, 2, first.dependencies()).run()
    (event,) = Ledger(directory).records("prepared")
    assert event["leftOut"] == {"cut": 1}
    assert event["problems"][0].startswith(f"{rows}:21: nothing to learn is left")
    assert "40 rows read, 39 samples" in event["summary"]
    assert f"data is prepared: {event['summary']}" in caplog.messages
    second = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10, commits=[10])])
    Driver(directory, job, 3, second.dependencies()).run()
    assert len(Ledger(directory).records("prepared")) == 1
    status = files.read_json(directory.status)
    assert status is not None
    assert status["dataLeftOut"].startswith("1 row left out"), "also after a resume, which reads no rows"


def test_sources_that_do_not_fit_together_fail_the_job_before_waiting_for_workers(
    runs: Runs, directory: JobDirectory, tmp_path: Path
) -> None:
    mixture = []
    for name, tokenizer in (("sql", "abc"), ("chat", "def")):
        shutil.copytree(runs.shards("seq2seq"), tmp_path / name)
        manifest = {"tokenizerHash": tokenizer, "options": {"text": {}}}
        files.write_json(tmp_path / name / "manifest.json", manifest)
        mixture.append({"name": name, "train": {"source": str(tmp_path / name)}})
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10, commits=[10])])
    driver = Driver(directory, runs.job(dataset={"train": None, "mixture": mixture}), 1, cluster.dependencies())
    with pytest.raises(JobError, match="the sources sql and chat have another tokenizer"):
        driver.run()
    assert cluster.sizes == []


def test_a_run_with_a_checkpoint_goes_on_without_its_raw_data(
    runs: Runs, directory: JobDirectory, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "how many ?", "answer": "SELECT 1"}\n' * 32)
    dataset = {"train": None, "prepare": {"source": str(rows)}, "prompt": "{question}", "completion": "{answer}"}
    job = runs.job(dataset=dataset, workers={"count": 2, "gpus": 0})
    first = SimulatedCluster([ScriptedGroup(Stopped(), last_step=5, commits=[5])])
    with pytest.raises(StoppedError):
        Driver(directory, job, 1, first.dependencies()).run()
    rows.unlink()
    second = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10, commits=[10])])
    Driver(directory, job, 2, second.dependencies()).run()
    assert second.sizes == [2]


def test_raw_data_that_is_missing_before_the_first_checkpoint_fails_the_job(
    runs: Runs, directory: JobDirectory, tmp_path: Path
) -> None:
    dataset = {"train": None, "prepare": {"source": str(tmp_path / "none.jsonl")}, "text": "question"}
    job = runs.job("causal", dataset=dataset, workers={"count": 2, "gpus": 0})
    cluster = SimulatedCluster([])
    with pytest.raises(JobError, match=r"none\.jsonl"):
        Driver(directory, job, 1, cluster.dependencies()).run()
