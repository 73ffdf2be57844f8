"""Runs with NEFTune's noise are as exact as those without. See test_parity.py for those of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.preference import preference_job
from tests.trainer.support.runs import (
    STEPS,
    Layout,
    Runs,
    committed_state,
    losses,
    sample_hashes,
    train_generation,
)

pytestmark = pytest.mark.slow

ALONE = Layout(1, 0)
FP32 = 1e-6
NOISE = {"neftuneNoiseAlpha": 5.0}
LORA = {"lora": {"r": 4, "alpha": 12, "dropout": 0.1}}


@pytest.mark.parametrize(
    ("task", "layout", "sections"),
    [
        ("seq2seq", Layout(2, 2), {}),
        pytest.param("causal", Layout(2, 3), {"execution": {"gradientCheckpointing": True}}, marks=pytest.mark.long),
        ("causal", Layout(2, 1), {"adapter": LORA}),
        pytest.param("causal", Layout(1, 1), {"execution": {"compile": True}}, marks=pytest.mark.long),
    ],
    ids=["seq2seq", "recomputed", "adapter", "compiled"],
)
def test_an_interrupted_run_ends_with_the_same_bits(
    runs: Runs, task: str, layout: Layout, sections: dict[str, Any]
) -> None:
    job = runs.job(task, training=NOISE, **sections)
    resumed, undisturbed = runs.with_and_without_loss(job, layout, timeout=400)
    assert losses(resumed) == losses(undisturbed)
    found, expected = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "layouts"),
    [
        pytest.param("seq2seq", [Layout(2, 0), Layout(2, 3)], marks=pytest.mark.long),
        ("causal", [Layout(2, 1), Layout(3, 2)]),
    ],
    ids=["seq2seq", "causal"],
)
def test_noise_is_the_same_at_every_layout(runs: Runs, task: str, layouts: list[Layout]) -> None:
    job = runs.job(task, training=NOISE)
    alone = runs.empty("alone")
    train_generation(alone, job, ALONE)
    for layout in layouts:
        run = runs.empty("noisy")
        train_generation(run, job, layout)
        assert sample_hashes(run) == sample_hashes(alone)
        assert losses(run) == pytest.approx(losses(alone), rel=FP32)
    plain = losses(runs.finished(ALONE, task))
    assert all(abs(noisy - without) > 1e-5 * without for noisy, without in zip(losses(alone), plain, strict=True))


@pytest.mark.long
def test_pairs_resume_exactly_and_the_reference_model_gets_no_noise(runs: Runs, tmp_path: Path) -> None:
    noisy = preference_job(tmp_path, "dpo", training={**NOISE, "epochs": 1}, checkpoint={"every": 4, "keep": 3})
    undisturbed = runs.empty("finished-noisy-pairs")
    train_generation(undisturbed, noisy, Layout(2, 2))
    resumed = runs.interrupted(undisturbed, step=4)
    train_generation(resumed, noisy, Layout(2, 2))
    assert losses(resumed) == losses(undisturbed)
    plain = runs.empty("plain-pairs")
    train_generation(plain, preference_job(tmp_path, "dpo", training={"epochs": 1}), ALONE)
    assert losses(plain)[0] != pytest.approx(losses(undisturbed)[0], rel=1e-5)
    assert reference_log_probs(plain) == reference_log_probs(undisturbed)


@pytest.mark.parametrize("task", ["seq2seq", "causal"])
def test_evaluation_has_no_noise(runs: Runs, task: str) -> None:
    """The learning rate of the only step is 0: both models are the initial one."""
    training = {"maxSteps": 1, "warmupSteps": 1}
    results = []
    for noise in ({}, NOISE):
        job = runs.job(task, training={**training, **noise}, dataset={"eval": {"fraction": 0.25}})
        directory = runs.empty("evaluated")
        summary = train_generation(directory, job, ALONE).summary
        results.append((losses(directory)[0], summary["evalLoss"]))
    (plain, plain_evaluation), (noisy, noisy_evaluation) = results
    assert noisy != pytest.approx(plain, rel=1e-5)
    assert noisy_evaluation == plain_evaluation


def reference_log_probs(directory: JobDirectory) -> list[bytes]:
    """The files with the reference model's log-probabilities."""
    found = [path.read_bytes() for path in sorted(directory.reference.glob("*/*.npy"))]
    assert found
    return found
