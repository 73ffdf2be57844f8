"""Reward models: exact resumes from pretrained weights, and exports that score as the engine did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.export.predict import Predictor
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.pretrained import build_model
from tests.trainer.support.preference import PAIRS, STEPS, preference_job
from tests.trainer.support.runs import Layout, Runs, committed_state, losses, sample_hashes, train_generation
from tests.trainer.support.tiny import make_job, save_source

pytestmark = pytest.mark.slow

HALF = STEPS // 2


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    """A causal model with weights, which has no reward head; returns its folder."""
    folder = save_source(tmp_path / "model", "causal", attention_dropout=0.0)
    build_model(make_job(folder, "causal")).save_pretrained(folder)
    return folder


def reward_job(root: Path, language_model: Path, **sections: Any) -> FinetuneJob:
    """A job that trains a reward model from the weights of a language model."""
    model = {"source": str(language_model), "task": "causal", "dtype": "float32", "initialise": "pretrained"}
    return preference_job(root, "reward", model=model, **sections)


def test_a_run_from_a_language_model_resumes_exactly(tmp_path: Path, language_model: Path, runs: Runs) -> None:
    job = reward_job(tmp_path, language_model, checkpoint={"every": HALF, "keep": 3}, execution={"flopsProfile": 2})
    undisturbed = runs.empty("finished-reward")
    train_generation(undisturbed, job, Layout(2, 1))
    resumed = runs.interrupted(undisturbed, HALF)
    train_generation(resumed, job, Layout(2, 1))
    expected, found = committed_state(undisturbed, STEPS), committed_state(resumed, STEPS)
    assert any("score.weight" in name for name in expected)
    assert not any("lm_head" in name for name in expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert losses(resumed) == losses(undisturbed)
    profile = json.loads(undisturbed.flops_profile.read_text())
    assert profile["parameters"] == sum(parameter.numel() for parameter in build_model(job).parameters())


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(Layout(2, 1), Layout(3, 2)), (Layout(2, 3), Layout(1, 0))], ids=str)
def test_a_run_resumes_at_another_world_size(
    tmp_path: Path, language_model: Path, runs: Runs, before: Layout, after: Layout
) -> None:
    job = reward_job(tmp_path, language_model, checkpoint={"every": HALF, "keep": 3})
    undisturbed = runs.empty("finished-reward")
    train_generation(undisturbed, job, before)
    resumed = runs.interrupted(undisturbed, HALF)
    train_generation(resumed, job, after)
    assert sample_hashes(resumed) == sample_hashes(undisturbed)
    assert losses(resumed) == pytest.approx(losses(undisturbed), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(1, 0), Layout(2, 3)], ids=str)
def test_the_export_scores_as_the_engine_did(tmp_path: Path, language_model: Path, runs: Runs, layout: Layout) -> None:
    dataset = {"eval": {"source": str(tmp_path / "shards")}}
    job = reward_job(tmp_path, language_model, dataset=dataset, training={"evaluation": {"everySteps": HALF}})
    directory = runs.empty("exported-reward")
    scores = train_generation(directory, job, layout).summary["scores"]
    assert scores["rewardAccuracy"] > 0.9
    assert scores["rewardMargin"] == pytest.approx(scores["rewardChosen"] - scores["rewardRejected"], abs=1e-6)
    assert surviving_steps(directory)[-1]["rewardMargin"] > surviving_steps(directory)[0]["rewardMargin"]

    auto: Any = AutoModelForSequenceClassification
    model, report = auto.from_pretrained(directory.export, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys"))
    assert model.config.num_labels == 1
    chosen, rejected = mean_rewards(model.eval(), AutoTokenizer.from_pretrained(directory.export), job)
    assert chosen == pytest.approx(scores["rewardChosen"], abs=1e-5)
    assert rejected == pytest.approx(scores["rewardRejected"], abs=1e-5)
    names_itself_a_reward_model(directory)


def names_itself_a_reward_model(directory: JobDirectory) -> None:
    """Check what the files of an export say, and the error of `spotune predict`."""
    card = (directory.export / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "This is a reward model." in card
    assert "spotune predict" not in card
    assert json.loads((directory.export / "spotune.json").read_text())["task"] == "reward"
    assert not (directory.export / "generation_config.json").exists()
    assert "score.weight" in load_file(directory.export / "model.safetensors")
    with pytest.raises(JobError, match=r"is a reward model .*AutoModelForSequenceClassification"):
        Predictor.load(directory.root)


def mean_rewards(model: Any, tokenizer: Any, job: FinetuneJob) -> tuple[float, float]:
    """Mean rewards of all chosen and of all rejected answers, each padded by the tokenizer."""
    assert job.spec.dataset.train is not None
    shards = ShardedDataset(str(job.spec.dataset.train.source), Path(str(job.spec.dataset.train.source)) / "cache")
    chosen, rejected = [], []
    for sample in range(PAIRS):
        row = shards[sample]
        middle = int(row["pair_lengths"][0])
        chosen.append(row["input_ids"][:middle].tolist())
        rejected.append(row["input_ids"][middle:].tolist())
    with torch.no_grad():
        batches = [tokenizer.pad({"input_ids": answers}, return_tensors="pt") for answers in (chosen, rejected)]
        means = [float(model(**batch).logits.double().mean()) for batch in batches]
    return means[0], means[1]
