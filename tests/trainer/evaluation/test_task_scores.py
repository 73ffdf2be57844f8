"""lm-evaluation-harness during training: the scores of its own class for transformers models, by all ranks together."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, LlamaConfig, T5Config

from spotune.job import HarnessSpec
from spotune_trainer import files
from spotune_trainer.evaluation.harness import evaluate_export, harness_scores
from spotune_trainer.evaluation.ranks import RankGroup
from spotune_trainer.evaluation.task_scores import TaskScores, score_tasks
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.decoding import generation_config_with_special_tokens
from tests.trainer.support.groups import run_group
from tests.trainer.support.harness_tasks import GENERATING_TASK, ROLLING_TASK, TASK, write_tasks
from tests.trainer.support.runs import STEPS, STEPS_PER_EPOCH, Layout, Runs, train_generation
from tests.trainer.support.tiny import VOCABULARY, save_source

ALL_TASKS = [TASK, ROLLING_TASK, GENERATING_TASK]
EVERY = 4
TIMEOUT = 600.0
"""Seconds that a group may take. Each evaluation imports the harness anew, which takes seconds on an idle machine."""
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("harness") / "tasks")


def spec_of(tasks: Path, **values: Any) -> HarnessSpec:
    return HarnessSpec.model_validate({"tasks": ALL_TASKS, "includePath": str(tasks), **values})


def save_model(folder: Path, kind: str) -> Path:
    """Save a model whose answers differ from prompt to prompt."""
    save_source(folder, kind, **SPECIAL_TOKENS)
    torch.manual_seed(0)
    if kind == "causal":
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
    else:
        model = AutoModelForSeq2SeqLM.from_config(T5Config.from_pretrained(folder))
    for parameter in model.parameters():
        parameter.data.mul_(4)
    model.generation_config = generation_config_with_special_tokens(
        model, AutoTokenizer.from_pretrained(folder), pretrained=False
    )
    model.save_pretrained(folder)
    assert model.config.vocab_size == VOCABULARY
    return folder


def score_model(rank: int, world_size: int, folder: Path, kind: str, spec: HarnessSpec) -> TaskScores:
    """Scores of a saved model. What the harness changes in its own process must not change here."""
    loader: Any = AutoModelForCausalLM if kind == "causal" else AutoModelForSeq2SeqLM
    model, tokenizer = loader.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.train()
    beats: list[int] = []
    before = _state_of_this_process()
    scores = score_tasks(
        spec,
        model,
        tokenizer,
        pretrained=False,
        batch_size=4,
        ranks=RankGroup(rank, world_size),
        heartbeat=lambda: beats.append(1),
    )
    assert _state_of_this_process() == before
    assert all(module.training for module in model.modules())
    assert len(beats) > 10
    return scores


def _state_of_this_process() -> Any:
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    generators = torch.get_rng_state().tolist(), random.getstate(), numpy_state["state"]["key"].tolist()
    return *generators, Path.cwd(), list(logging.getLogger().handlers), logging.getLogger().level


@pytest.mark.long
@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_scores_are_those_of_the_harness_for_the_same_weights_at_any_world_size(
    kind: str, tmp_path: Path, tasks: Path
) -> None:
    folder = save_model(tmp_path / "model", kind)
    spec = spec_of(tasks)
    one, two = (run_group(size, score_model, folder, kind, spec, timeout=TIMEOUT) for size in (1, 2))
    assert one[0].problem is None
    assert two == [one[0]] * 2, "bit for bit"
    expected = harness_scores(evaluate_export(spec, folder, device="cpu", batch_size=4))
    assert one[0].scores == pytest.approx(expected, rel=1e-6)
    assert len(expected) == 5
    assert all(score > 0 for score in expected.values()), "scores that tell models apart"


def harness_job(runs: Runs, tasks: Path, every: int, names: list[str], **sections: Any) -> Any:
    """A job of ten steps that keeps the best by a score of tasks. So the last step is scored before the export, too."""
    evaluation = {
        "harness": {"tasks": names, "includePath": str(tasks), "everySteps": every},
        "best": {"metric": f"{TASK}/acc"},
    }
    return runs.job("causal", training={"evaluation": evaluation}, **sections)


def events_of(directory: JobDirectory, generation: int, name: str = "harness") -> list[Mapping[str, Any]]:
    events = files.read_lines(directory.generation_logs(generation).events)
    return [event for event in events if event["event"] == name]


@pytest.mark.long
def test_training_is_the_same_with_scores_and_a_resume_neither_repeats_nor_loses_one(runs: Runs, tasks: Path) -> None:
    layout = Layout(2, 3)
    plain = runs.finished(layout, "causal")
    job = harness_job(runs, tasks, EVERY, [TASK, GENERATING_TASK], output={"export": "last"})
    undisturbed = runs.empty("scored")
    result = train_generation(undisturbed, job, layout, timeout=TIMEOUT)

    [weights] = (plain.export).glob("*.safetensors")
    assert (undisturbed.export / weights.name).read_bytes() == weights.read_bytes()
    *during, last, exported = events_of(undisturbed, 1)
    assert [event["step"] for event in (*during, last, exported)] == [EVERY, 2 * EVERY, STEPS, STEPS]
    assert last["scores"] == pytest.approx(exported["scores"], rel=1e-6), "the same weights, exported"
    assert result.summary["best"]["metric"] == f"{TASK}/acc"
    progress = files.read_json(undisturbed.generation_logs(1).progress) or {}
    assert progress["evalScores"] == exported["scores"]

    resumed = runs.interrupted(undisturbed, step=STEPS_PER_EPOCH)
    repeated = train_generation(resumed, job, layout, timeout=TIMEOUT)
    assert [event["step"] for event in events_of(resumed, 2)] == [2 * EVERY, STEPS, STEPS]
    assert repeated.summary["best"] == result.summary["best"]
    assert [event["scores"] for event in events_of(resumed, 2)] == [
        event["scores"] for event in (*during[1:], last, exported)
    ]


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        pytest.param(Layout(1, 0), {"adapter": {"lora": {"r": 4}}}, id="adapter", marks=pytest.mark.long),
        pytest.param(Layout(1, 3), {"execution": {"compile": True}}, id="compiled", marks=pytest.mark.long),
    ],
)
def test_the_model_in_training_is_scored_as_it_is_exported(
    layout: Layout, sections: dict[str, Any], runs: Runs, tasks: Path
) -> None:
    job = harness_job(runs, tasks, STEPS, ALL_TASKS, output={"export": "last"}, **sections)
    directory = runs.empty("scored-once")
    train_generation(directory, job, layout, timeout=TIMEOUT)
    last, exported = events_of(directory, 1)
    assert last["scores"] == pytest.approx(exported["scores"], rel=1e-5)


@pytest.mark.long
def test_a_task_that_fails_during_training_does_not_end_it(tmp_path: Path, runs: Runs) -> None:
    folder = write_tasks(tmp_path / "tasks")
    (folder / "rows.jsonl").unlink()
    evaluation = {"harness": {"tasks": [TASK], "includePath": str(folder), "everySteps": EVERY}}
    job = runs.job("causal", training={"epochs": 1, "evaluation": evaluation})
    directory = runs.empty("failed-scores")
    train_generation(directory, job, Layout(2, 0), timeout=TIMEOUT)
    first, _ = events_of(directory, 1, "harness-failed")
    assert first["step"] == EVERY
    assert first["reason"].startswith(f"after step {EVERY}: training.evaluation.harness: the tasks failed on the model")
    assert "rows.jsonl" in first["reason"]
    assert (directory.export / "model.safetensors").exists()


def test_a_harness_that_asks_nothing_has_failed(tmp_path: Path, tasks: Path) -> None:
    folder = save_model(tmp_path / "model", "causal")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scores = score_tasks(spec_of(tasks), model, tokenizer, pretrained=False, batch_size=4, silent_seconds=0.0)
    assert scores.problem is not None
    assert "asked nothing for 0 s, retry.hangTimeout" in scores.problem
