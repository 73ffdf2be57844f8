"""A run on a mixture: the samples of each source in the result, evaluated source by source, at any world size."""

from __future__ import annotations

from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.tracking.tracker import evaluation_point
from tests.trainer.support.runs import Layout, Runs, committed, sample_hashes, train_generation, write_shards

pytestmark = pytest.mark.slow


def mixture_job(runs: Runs, **training: Any) -> FinetuneJob:
    mixture: list[dict[str, Any]] = []
    for seed, (name, rows) in enumerate({"sql": 40, "chat": 20}.items()):
        folder = runs.root / f"journey-{name}"
        if not folder.exists():
            write_shards(folder, "seq2seq", rows, seed)
        mixture.append({"name": name, "train": {"source": str(folder)}, "weight": 3 - 2 * seed})
    evaluated = {"train": None, "mixture": mixture, "eval": {"fraction": 0.1}}
    values = {"epochs": None, "maxSteps": 8, "evaluation": {"everySteps": 4}}
    return runs.job(dataset=evaluated, training=values | training)


def trained(runs: Runs, layout: Layout) -> tuple[JobDirectory, dict[str, Any]]:
    directory = runs.empty("mixture")
    return directory, train_generation(directory, mixture_job(runs), layout).summary


def test_result_has_the_samples_and_the_evaluation_of_each_source(runs: Runs) -> None:
    directory, summary = trained(runs, Layout(1, 0))
    # An epoch has 36 + 18 samples: 16, 16, 16 and 6. Three quarters of 108 are from the first source.
    assert summary["samples"] == 108
    assert summary["samplesBySource"] == {"sql": 81, "chat": 27}
    by_source = summary["evalBySource"]
    assert list(by_source) == ["sql", "chat"]
    low, high = sorted(each["loss"] for each in by_source.values())
    assert low < summary["evalLoss"] < high
    progress = files.read_json(directory.generation_logs(1).progress)
    assert progress is not None
    assert progress["evalBySource"] == by_source
    assert [record["epoch"] for record in surviving_steps(directory)] == [step / 4 for step in range(1, 9)]
    events = [event for event in files.read_lines(directory.generation_logs(1).events) if event["event"] == "evaluated"]
    assert [event["step"] for event in events] == [4, 8]
    point = evaluation_point(events[-1])
    assert point == {
        "eval/loss": summary["evalLoss"],
        "eval/loss/sql": by_source["sql"]["loss"],
        "eval/loss/chat": by_source["chat"]["loss"],
    }

    wide, of_two = trained(runs, Layout(2, 1))
    assert sample_hashes(wide) == sample_hashes(directory)
    assert of_two["samplesBySource"] == summary["samplesBySource"]
    for name, scores in of_two["evalBySource"].items():
        assert scores["loss"] == pytest.approx(by_source[name]["loss"], rel=1e-5)


@pytest.mark.long
def test_evaluation_of_each_source_is_that_of_the_exported_checkpoint(runs: Runs) -> None:
    directory = runs.empty("mixture-best")
    rising = {"learningRate": 1.0, "scheduler": "constant_with_warmup", "warmupSteps": 5}  # the loss rises after step 4
    evaluation = {"everySteps": 4, "best": {"metric": "loss"}}
    summary = train_generation(directory, mixture_job(runs, **rising, evaluation=evaluation), Layout(1, 0)).summary
    events = [event for event in files.read_lines(directory.generation_logs(1).events) if event["event"] == "evaluated"]
    assert summary["exportStep"] == 4 < summary["steps"]
    assert summary["evalBySource"] == events[0]["evalBySource"] != events[1]["evalBySource"]
    history = committed(directory, 4).manifest.evaluations
    assert [each.by_source for each in history] == [summary["evalBySource"]], "it needs no log of an earlier group"
    progress = files.read_json(directory.generation_logs(1).progress)
    assert progress is not None
    assert progress["evalBySource"] == summary["evalBySource"]
