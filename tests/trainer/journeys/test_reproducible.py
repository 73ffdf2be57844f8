"""With `execution.reproducible: worldSize`, losses and weights have the same bits at any number of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune.job.training.metric import STEP_STATISTICS
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.embedding import embedding_job
from tests.trainer.support.labelled import labelled_job
from tests.trainer.support.overflowing_worker import OVERFLOWING_STEPS, OverflowingWorker
from tests.trainer.support.preference import preference_job
from tests.trainer.support.runs import MICRO_BATCH, STEPS, Layout, Runs, committed_state, losses, train_generation

pytestmark = pytest.mark.slow

EXECUTION = {"microBatchSize": MICRO_BATCH, "reproducible": "worldSize"}
LAYOUTS = {
    "float32": [Layout(1, 0), Layout(2, 1), Layout(3, 2), Layout(4, 0)],
    "bfloat16": [Layout(1, 1), Layout(2, 2), Layout(3, 1), Layout(4, 2)],
}
SHORT: dict[str, Any] = {
    "execution": EXECUTION,
    "training": {"maxSteps": 3, "warmupSteps": 0},
    "checkpoint": {"every": 3, "keep": 3},
}
JOBS: dict[str, Callable[[Path], FinetuneJob]] = {
    "a step's rows are negatives": lambda root: embedding_job(root, dropout=0.1, **SHORT),
    "a step's rows are a reference point": lambda root: preference_job(root, "kto", **SHORT),
    "a reference model": lambda root: preference_job(root, "dpo", **SHORT),
    "labels of words": lambda root: labelled_job(root, "tokenClassification", **SHORT),
}


def digest(run: JobDirectory, step: int) -> str:
    """SHA-256 of masters and moments in the checkpoint of a step."""
    found = hashlib.sha256()
    for name, tensor in sorted(committed_state(run, step).items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


NUMBERS = {"loss", "gradNorm", *chain(*STEP_STATISTICS.values())}


def numbers(run: JobDirectory) -> list[dict[str, Any]]:
    """Loss, gradient norm and statistics of every step, by name."""
    return [{name: record[name] for name in sorted(NUMBERS & record.keys())} for record in surviving_steps(run)]


def trained(runs: Runs, job: FinetuneJob, layouts: Sequence[Layout]) -> list[JobDirectory]:
    """A run at each of the layouts."""
    directories = [runs.empty("reproducible") for _ in layouts]
    for directory, layout in zip(directories, layouts, strict=True):
        train_generation(directory, job, layout)
    return directories


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_losses_and_weights_are_the_same_at_any_world_size(runs: Runs, dtype: str) -> None:
    first, *others = trained(runs, runs.job("causal", dtype, execution=EXECUTION), LAYOUTS[dtype])
    assert len(losses(first)) == STEPS
    for other in others:
        assert numbers(other) == numbers(first)
        assert digest(other, STEPS) == digest(first, STEPS)
        weights = "model.safetensors"
        assert (other.export / weights).read_bytes() == (first.export / weights).read_bytes()


@pytest.mark.long
def test_eight_ranks_give_the_bits_of_one(runs: Runs) -> None:
    """Most of them have no micro-batch in a step."""
    alone, eight = trained(runs, runs.job(execution=EXECUTION), [Layout(1, 1), Layout(8, 1)])
    assert numbers(eight) == numbers(alone)
    assert digest(eight, STEPS) == digest(alone, STEPS)


def test_run_that_shrinks_and_grows_ends_with_the_weights_of_one_that_did_not(runs: Runs) -> None:
    # The first commit of each group, which is never skipped because another one goes on.
    job, later = (
        runs.job("causal", execution=EXECUTION, training={"emaDecay": 0.9}, checkpoint={"every": every, "keep": STEPS})
        for every in (4, 6)
    )
    (undisturbed,) = trained(runs, job, [Layout(2, 1)])
    changed = runs.interrupted(undisturbed, step=4)
    train_generation(changed, later, Layout(3, 1))
    changed = runs.interrupted(changed, step=6)
    train_generation(changed, job, Layout(1, 0))
    assert [record["worldSize"] for record in surviving_steps(changed)] == [2] * 4 + [3] * 2 + [1] * 4
    assert numbers(changed) == numbers(undisturbed)
    assert digest(changed, STEPS) == digest(undisturbed, STEPS)


@pytest.mark.long
def test_without_the_setting_another_world_size_gives_other_bits(runs: Runs) -> None:
    """Negative control: the comparison finds runs that differ in their last digits."""
    first, second = runs.finished(Layout(1, 1), "causal"), runs.finished(Layout(2, 1), "causal")
    assert losses(second) == pytest.approx(losses(first), rel=1e-6)
    assert digest(second, STEPS) != digest(first, STEPS)


def test_the_setting_changes_results_by_rounding_alone(runs: Runs) -> None:
    (exact,) = trained(runs, runs.job("causal", execution=EXECUTION), [Layout(2, 1)])
    usual = runs.finished(Layout(2, 1), "causal")
    assert losses(exact) == pytest.approx(losses(usual), rel=1e-6)
    norms = [[record["gradNorm"] for record in surviving_steps(each)] for each in (exact, usual)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_other_objectives_are_the_same_at_any_world_size(runs: Runs, tmp_path: Path, name: str) -> None:
    job = JOBS[name](tmp_path)
    alone, three = trained(runs, job, [Layout(1, 1), Layout(3, 1)])
    statistics = STEP_STATISTICS[job.spec.training.objective]
    assert [set(found) for found in numbers(alone)] == [{"loss", "gradNorm", *statistics}] * 3
    assert numbers(three) == numbers(alone)
    assert digest(three, 3) == digest(alone, 3)


@pytest.mark.long
def test_adapters_and_noise_are_the_same_at_any_world_size(runs: Runs) -> None:
    adapter = {"lora": {"r": 2, "dropout": 0.1}}
    training = {**SHORT["training"], "neftuneNoiseAlpha": 5}
    job = runs.job("causal", **{**SHORT, "training": training}, adapter=adapter)
    alone, three = trained(runs, job, [Layout(1, 1), Layout(3, 2)])
    assert numbers(three) == numbers(alone)
    assert digest(three, 3) == digest(alone, 3)


@pytest.mark.parametrize("layout", [Layout(1, 0), Layout(3, 1)], ids=str)
def test_steps_that_are_not_finite_are_skipped(runs: Runs, layout: Layout) -> None:
    directory = runs.empty("overflowing")
    train_generation(directory, runs.job(execution=EXECUTION), layout, OverflowingWorker)
    skipped = [record["step"] for record in surviving_steps(directory) if record["skipped"]]
    assert skipped == list(OVERFLOWING_STEPS)
