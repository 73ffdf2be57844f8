"""lm-evaluation-harness at the end of a run: its own scores of the export, and errors before training."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from spotune.errors import JobError
from spotune.job import BestSpec, HarnessSpec
from spotune_trainer import files
from spotune_trainer.driver.driver import Driver, DriverDependencies
from spotune_trainer.evaluation import harness
from spotune_trainer.evaluation.harness import check_tasks, evaluate_export, harness_scores
from spotune_trainer.observability.tracking.tracker import harness_point
from tests.trainer.support.harness_tasks import GENERATING_TASK, ROLLING_TASK, TASK, write_task, write_tasks
from tests.trainer.support.runs import Layout, Runs, train_generation
from tests.trainer.support.tiny import save_source

pytestmark = pytest.mark.slow


def harness_spec(folder: Path, *tasks: str, **values: Any) -> HarnessSpec:
    return HarnessSpec.model_validate({"tasks": list(tasks) or [TASK], "includePath": str(folder), **values})


def scores_of_its_own_command(export: Path, folder: Path, output: Path) -> dict[str, float]:
    """The scores that `lm_eval` prints for an exported folder."""
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={export}"),
        *("--device", "cpu", "--tasks", TASK, "--include_path", str(folder), "--output_path", str(output)),
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    [written] = output.rglob("results*.json")
    values = json.loads(written.read_text())["results"][TASK]
    return {f"{TASK}/acc": values["acc,none"], f"{TASK}/acc_norm": values["acc_norm,none"]}


@pytest.mark.long
def test_scores_are_those_of_the_harness_for_the_exported_folder(tmp_path: Path, runs: Runs) -> None:
    folder = write_task(tmp_path / "tasks")
    job = runs.job(
        "causal", training={"epochs": 1, "evaluation": {"harness": {"tasks": [TASK], "includePath": str(folder)}}}
    )
    directory = runs.empty("harness")
    result = train_generation(directory, job, Layout(2, 2))
    expected = scores_of_its_own_command(directory.export, folder, tmp_path / "results")
    assert 0 < expected[f"{TASK}/acc"] < 1, "a score that tells models apart"
    assert result.summary["scores"] == expected
    assert "harnessProblem" not in result.summary
    [recorded] = [
        event for event in files.read_lines(directory.generation_logs(1).events) if event["event"] == "harness"
    ]
    assert harness_point(recorded) == {f"harness/{name}": value for name, value in expected.items()}
    progress = files.read_json(directory.generation_logs(1).progress) or {}
    assert progress["evalScores"] == expected
    assert f"| {TASK}/acc | {expected[f'{TASK}/acc']:.4g} |" in (directory.export / "README.md").read_text()


@pytest.mark.long
def test_a_task_that_fails_at_the_end_leaves_a_trained_model_and_says_why(tmp_path: Path, runs: Runs) -> None:
    folder = write_task(tmp_path / "tasks")
    (folder / "rows.jsonl").unlink()
    spec = {"tasks": [TASK], "includePath": str(folder)}
    job = runs.job("causal", training={"epochs": 1, "evaluation": {"harness": spec}})
    directory = runs.empty("failed-harness")
    result = train_generation(directory, job, Layout(1, 0))
    assert "training.evaluation.harness: the tasks failed" in result.summary["harnessProblem"]
    assert "rows.jsonl" in result.summary["harnessProblem"]
    assert (directory.export / "model.safetensors").exists()


@pytest.mark.long
def test_forward_passes_are_heartbeats_and_the_limit_holds(tmp_path: Path) -> None:
    model = save_source(tmp_path / "model", "causal")
    LlamaForCausalLM(LlamaConfig.from_pretrained(model)).save_pretrained(model)
    spec = harness_spec(write_task(tmp_path / "tasks"), limit=2, numFewshot=1)
    beats: list[float] = []
    results = evaluate_export(spec, model, device="cpu", batch_size=1, heartbeat=lambda: beats.append(time.monotonic()))
    assert beats
    assert results["n-samples"][TASK]["effective"] == 2
    assert results["n-shot"] == {TASK: 1}


def test_a_task_whose_data_is_missing_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks")
    (folder / "rows.jsonl").unlink()
    with pytest.raises(JobError, match=r"harness\.tasks: singers cannot be loaded \(FileNotFoundError: .*rows\.jsonl"):
        check_tasks(harness_spec(folder))


def test_a_task_that_runs_what_the_model_writes_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks")
    with (folder / "singers.yaml").open("a") as file:
        file.write("unsafe_code: true\n")
    with pytest.raises(JobError, match=r"harness\.tasks: singers runs code that the model writes: remove it"):
        check_tasks(harness_spec(folder))


@pytest.mark.long
def test_a_task_that_samples_is_refused_during_training(tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    path = folder / "answers.yaml"
    path.write_text(path.read_text().replace("do_sample: false", "do_sample: true"))
    check_tasks(harness_spec(folder, TASK, GENERATING_TASK))
    with pytest.raises(JobError, match=r"harness\.tasks: answers samples its answers \(do_sample\), which everySteps"):
        check_tasks(harness_spec(folder, TASK, GENERATING_TASK, everySteps=10))


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ({"metric": f"{GENERATING_TASK}/chrf/whole"}, None),
        ({"metric": f"{ROLLING_TASK}/byte_perplexity"}, None),
        (
            {"metric": f"{TASK}/accuracy"},
            r"^training\.evaluation\.best\.metric: the tasks have no score singers/accuracy: .* such as singers/acc",
        ),
        (
            {"metric": f"{ROLLING_TASK}/byte_perplexity", "mode": "max"},
            r"^training\.evaluation\.best\.mode: lower values of lyrics/byte_perplexity are better: set min",
        ),
    ],
    ids=["metric with a filter", "lower is better", "unknown metric", "wrong mode"],
)
def test_the_best_is_compared_by_a_score_that_the_tasks_have(
    best: dict[str, str], expected: str | None, tmp_path: Path
) -> None:
    spec = harness_spec(write_tasks(tmp_path / "tasks"), TASK, ROLLING_TASK, GENERATING_TASK, everySteps=10)
    if expected is None:
        check_tasks(spec, BestSpec.model_validate(best))
    else:
        with pytest.raises(JobError, match=expected):
            check_tasks(spec, BestSpec.model_validate(best))


def test_relative_data_files_begin_in_the_folder_of_the_tasks(tmp_path: Path) -> None:
    before = Path.cwd()
    check_tasks(harness_spec(write_task(tmp_path / "tasks")))
    assert Path.cwd() == before


def test_a_driver_refuses_an_unknown_task_before_it_waits_for_workers(tmp_path: Path, runs: Runs) -> None:
    folder = write_task(tmp_path / "tasks")
    spec = {"tasks": ["singer"], "includePath": str(folder)}
    job = runs.job("causal", training={"evaluation": {"harness": spec}})
    directory = runs.empty("refused-harness")
    driver = Driver(directory, job, 1, no_workers())
    with pytest.raises(
        JobError, match=r"harness\.tasks: there is no task singer in lm-eval .*: did you mean singers\?"
    ):
        driver.run()
    assert (files.read_json(directory.status) or {})["phase"] == "Failed"


class NoAgents:
    """The agents of a driver that never gets as far as to workers: the status asks them for unfit nodes alone."""

    def unfit_nodes(self) -> list[dict[str, Any]]:
        return []


def no_workers() -> DriverDependencies:
    """Dependencies of a driver that never gets as far as to workers."""
    return DriverDependencies(NoAgents())  # type: ignore[arg-type]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(harness, "find_spec", lambda _name: None)
    with pytest.raises(JobError, match=r"harness: the package lm-eval is not installed: run pip install"):
        check_tasks(harness_spec(tmp_path))


def test_scores_leave_out_errors_and_text_and_name_filters() -> None:
    values = {
        "alias": " - gsm8k",
        "sample_len": 5,
        "exact_match,strict-match": 0.25,
        "exact_match_stderr,strict-match": 0.1,
        "acc,none": 1,
        "perplexity,none": float("nan"),
        "bleu_stderr,none": "N/A",
    }
    assert harness_scores({"results": {"gsm8k": values}}) == {
        "gsm8k/exact_match/strict-match": 0.25,
        "gsm8k/acc": 1.0,
    }
