"""From rows to a trained model by way of a bucket."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from spotune.cli.main import main
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.training.worker import TrainResult
from tests.trainer.support.buckets import open_bucket
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import Layout, Runs, losses, make_task, sample_hashes, start_generation, train_rank

pytestmark = pytest.mark.slow

VARIABLES = ("S3_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "SPOTUNE_CACHE")


def train_rank_in(rank: int, world_size: int, environment: Mapping[str, str], task: WorkerTask) -> TrainResult:
    """Run one rank with other variables than those of the fork server."""
    os.environ.update(environment)
    return train_rank(rank, world_size, task)


def train(runs: Runs, source: str) -> JobDirectory:
    directory, layout = runs.empty("bucket"), Layout(1, 0)
    job = runs.job("causal", dropout=False, dataset={"train": {"source": source}})
    task = make_task(directory, job, layout, start_generation(directory))
    run_group(1, train_rank_in, {name: os.environ[name] for name in VARIABLES}, task)
    return directory


def test_a_run_learns_from_shards_in_a_bucket_what_it_learns_from_those_in_a_folder(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path / "cache"))
    rows = [{"q": f"how many {number} ?", "a": "count " * (number % 7)} for number in range(1, 75)]
    rows = [row for row in rows if row["a"]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = runs.job("causal", dropout=False).spec.model.source
    words = ["shard", str(tmp_path / "rows.jsonl"), "--tokenizer", tokenizer, "--prompt", "{q}", "--completion", "{a}"]
    with open_bucket("s3") as bucket:
        places = [str(tmp_path / "shards"), f"{bucket.url}/shards"]
        for place in places:
            with pytest.raises(SystemExit) as ended:
                main([*words, "--directory", place, "--output", "json"])
            assert ended.value.code == 0
            assert json.loads(capsys.readouterr().out)["directory"] == place
        of_folder, of_bucket = (train(runs, place) for place in places)
    assert len(losses(of_folder)) == 8
    assert losses(of_bucket) == losses(of_folder)
    assert sample_hashes(of_bucket) == sample_hashes(of_folder)
