"""Objectives that learn from preferences: their losses equal TRL's, and a resumed run is exact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.preference import BATCH, STEPS, preference_job
from tests.trainer.support.runs import Layout, Runs, committed_state, losses, train_generation

pytestmark = pytest.mark.slow

TRL = json.loads(Path("benchmarks/results/trl_preference.json").read_text(encoding="utf-8"))["losses"]
HALF = STEPS // 2


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("dpo", Layout(1, 0)),
        ("dpo", Layout(2, 1)),
        ("dpo", Layout(2, 2)),
        ("dpo", Layout(2, 3)),
        ("orpo", Layout(1, 0)),
        ("orpo", Layout(2, 3)),
        ("simpo", Layout(1, 0)),
        ("simpo", Layout(2, 3)),
        ("kto", Layout(1, 0)),
        pytest.param("kto", Layout(2, 1), marks=pytest.mark.long),
        pytest.param("kto", Layout(2, 2), marks=pytest.mark.long),
        ("kto", Layout(2, 3)),
        ("reward", Layout(1, 0)),
        ("reward", Layout(2, 1)),
        ("reward", Layout(2, 2)),
        ("reward", Layout(2, 3)),
    ],
    ids=str,
)
def test_losses_match_trl(tmp_path: Path, objective: str, layout: Layout) -> None:
    job = preference_job(tmp_path, objective)
    directory = JobDirectory(tmp_path / "run")
    train_generation(directory, job, layout)
    assert losses(directory) == pytest.approx(TRL[objective], rel=1e-4)
    assert losses(directory)[-1] < 0.97 * losses(directory)[0], "the weights moved far enough for a difference to show"


def test_kto_is_the_same_with_a_rank_that_has_no_samples(tmp_path: Path, runs: Runs) -> None:
    directory = runs.empty("idle")
    train_generation(directory, preference_job(tmp_path, "kto"), Layout(2, 3), micro_batch_size=BATCH)
    assert losses(directory) == pytest.approx(TRL["kto"], rel=1e-4)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_run_resumes_exactly_with_the_reference_of_its_first_generation(
    tmp_path: Path, runs: Runs, objective: str
) -> None:
    job = preference_job(tmp_path, objective, checkpoint={"every": HALF, "keep": 3})
    undisturbed = runs.empty(f"finished-{objective}")
    train_generation(undisturbed, job, Layout(2, 1))
    resumed = runs.interrupted(undisturbed, HALF)
    written = [path.stat().st_mtime_ns for path in reference_files(resumed)]
    train_generation(resumed, job, Layout(2, 1))
    assert [path.stat().st_mtime_ns for path in reference_files(resumed)] == written
    expected, found = committed_state(undisturbed, STEPS), committed_state(resumed, STEPS)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert losses(resumed) == losses(undisturbed)


def test_the_reference_is_the_same_at_any_world_size(tmp_path: Path, runs: Runs) -> None:
    job = preference_job(tmp_path, "dpo", training={"maxSteps": 1, "warmupSteps": 0})
    one, two = runs.empty("one"), runs.empty("two")
    train_generation(one, job, Layout(1, 0))
    train_generation(two, job, Layout(2, 3))
    assert len(reference_files(one)) == 4
    assert contents(one) == contents(two)


def test_a_run_whose_reference_is_lost_does_not_take_the_trained_model_as_reference(tmp_path: Path, runs: Runs) -> None:
    job = preference_job(tmp_path, "dpo", checkpoint={"every": HALF, "keep": 3})
    directory = runs.empty("finished-lost-reference")
    train_generation(directory, job, Layout(1, 0))
    resumed = runs.interrupted(directory, HALF)
    for path in reference_files(resumed):
        path.unlink()
    with pytest.raises(GroupFailedError, match=r"lacks log-probabilities of the reference model.*start the job anew"):
        train_generation(resumed, job, Layout(1, 0))


def test_steps_and_evaluations_report_rewards(tmp_path: Path, runs: Runs) -> None:
    job = preference_job(
        tmp_path, "dpo", dataset={"eval": {"fraction": 0.25}}, training={"evaluation": {"everySteps": HALF}}
    )
    directory = runs.empty("evaluated")
    result = train_generation(directory, job, Layout(2, 2))
    first, *_, last = surviving_steps(directory)
    assert first["rewardMargin"] == pytest.approx(0.0, abs=1e-4)
    assert last["rewardMargin"] == pytest.approx(last["rewardChosen"] - last["rewardRejected"], abs=1e-6)
    assert last["rewardMargin"] > 0.05
    assert result.summary["scores"]["rewardAccuracy"] == 1.0
    assert result.summary["evalLoss"] < np.log(2), "the loss of a model that prefers neither answer"


def test_kto_reports_rewards_by_label_at_any_world_size(tmp_path: Path, runs: Runs) -> None:
    job = preference_job(
        tmp_path, "kto", dataset={"eval": {"fraction": 0.25}}, training={"evaluation": {"everySteps": HALF}}
    )
    found = []
    for layout in (Layout(1, 0), Layout(2, 3)):
        directory = runs.empty(f"labelled-{layout.world_size}")
        summary = train_generation(directory, job, layout).summary
        first, *_, last = surviving_steps(directory)
        assert first["kl"] == first["rewardMargin"] == pytest.approx(0.0, abs=1e-4)
        assert last["rewardMargin"] == pytest.approx(last["rewardChosen"] - last["rewardRejected"], abs=1e-6)
        assert last["kl"] > 1, "the model left its reference"
        assert summary["evalLoss"] < 0.5, "the loss of the reference model"
        found.append({"loss": summary["evalLoss"], **summary["scores"]})
    assert found[0].keys() == {"loss", "kl", "rewardChosen", "rewardRejected", "rewardMargin"}
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize(
    ("objective", "shards_of", "message"),
    [
        ("dpo", "causal", "dpo learns from pairs, and .* has none"),
        ("sft", "pairs", "has pairs of chosen and rejected answers, and sft would learn both"),
        ("kto", "pairs", "kto learns from answers with a label, and .* has none"),
        ("sft", "labels", "has answers with a label, which only kto learns from"),
    ],
)
def test_shards_that_do_not_fit_the_objective_are_refused(
    tmp_path: Path, runs: Runs, objective: str, shards_of: str, message: str
) -> None:
    job = preference_job(tmp_path, "kto" if shards_of == "labels" else "dpo").model_dump(mode="json", exclude_none=True)
    source = runs.shards("causal") if shards_of == "causal" else tmp_path / "shards"
    job["spec"]["dataset"] = {"train": {"source": str(source)}}
    job["spec"]["training"] |= {"objective": objective, "preference": {}}
    with pytest.raises(GroupFailedError, match=message):
        train_generation(runs.empty("refused"), FinetuneJob.model_validate(job), Layout(1, 0))


def contents(directory: JobDirectory) -> list[bytes]:
    """The reference model's log-probabilities of all pairs, as bytes."""
    return [path.read_bytes() for path in reference_files(directory)]


def reference_files(directory: JobDirectory) -> list[Path]:
    """The files with the reference model's log-probabilities."""
    found = sorted(directory.reference.glob("*/*.npy"))
    assert found
    return found
