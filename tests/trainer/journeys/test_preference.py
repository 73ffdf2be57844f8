"""Objectives that learn from preferences: their losses equal TRL's, and a resumed run is exact."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.worker import Worker
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.preference import BATCH, STEPS, preference_job
from tests.trainer.support.runs import (
    Layout,
    Runs,
    at_all_layouts,
    committed_state,
    losses,
    resumed_at_another_layout,
    sample_hashes,
    train_generation,
)

pytestmark = pytest.mark.slow

TRL = json.loads(Path("benchmarks/results/trl_preference.json").read_text(encoding="utf-8"))["losses"]
HALF = STEPS // 2
LONG = pytest.mark.long
NEEDS_REFERENCE = ("dpo", "kto")
ADAPTER = {"lora": {"r": 4, "dropout": 0.1}}


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        *at_all_layouts("dpo", quick=[Layout(1, 0), Layout(2, 1), Layout(2, 2), Layout(2, 3)]),
        *at_all_layouts("orpo", quick=[Layout(1, 0), Layout(2, 3)]),
        *at_all_layouts("simpo", quick=[Layout(1, 0), Layout(2, 3)]),
        *at_all_layouts("kto", quick=[Layout(1, 0), Layout(2, 3)]),
        *at_all_layouts("reward", quick=[Layout(1, 0), Layout(2, 3)]),
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


@pytest.mark.parametrize(
    "objective", ["dpo", "kto", pytest.param("orpo", marks=LONG), pytest.param("simpo", marks=LONG)]
)
def test_a_run_resumes_exactly_with_the_reference_of_its_first_generation(
    tmp_path: Path, runs: Runs, objective: str
) -> None:
    job = preference_job(tmp_path, objective, checkpoint={"every": HALF, "keep": 3})
    undisturbed = runs.empty(f"finished-{objective}")
    train_generation(undisturbed, job, Layout(2, 1))
    resumed = runs.interrupted(undisturbed, HALF)
    written = times_of_writing(resumed)
    assert bool(written) is (objective in NEEDS_REFERENCE)
    train_generation(resumed, job, Layout(2, 1))
    assert times_of_writing(resumed) == written
    ends_alike(resumed, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("objective", ["kto", "orpo", "simpo"])
@pytest.mark.parametrize(("before", "after"), [(Layout(2, 1), Layout(3, 2)), (Layout(2, 3), Layout(1, 0))], ids=str)
def test_a_run_resumes_at_another_world_size(
    tmp_path: Path, runs: Runs, objective: str, before: Layout, after: Layout
) -> None:
    job = preference_job(tmp_path, objective, checkpoint={"every": HALF, "keep": 3})
    resumed, undisturbed = resumed_at_another_layout(runs, job, before, after, HALF)
    assert sample_hashes(resumed) == sample_hashes(undisturbed)
    assert losses(resumed) == pytest.approx(losses(undisturbed), rel=1e-5)


class KilledInReferencePass(Worker):
    """The rank that computes the first part of the reference's log-probabilities dies when it has stored it."""

    def compute_references(self) -> None:
        store = self.context.references.train
        assert store is not None
        write = store.write

        def write_and_die(part: int, values: npt.NDArray[np.float32], pairs: npt.NDArray[np.int64]) -> None:
            write(part, values, pairs)
            if part == 0:
                os._exit(9)

        store.write = write_and_die  # type: ignore[method-assign]
        super().compute_references()


@pytest.mark.parametrize("after", [Layout(1, 0), pytest.param(Layout(3, 2), marks=LONG)], ids=str)
def test_a_kill_in_the_reference_pass_loses_only_parts_in_work(tmp_path: Path, runs: Runs, after: Layout) -> None:
    job = preference_job(tmp_path, "dpo", training={"maxSteps": 1, "warmupSteps": 0})
    undisturbed, killed = runs.empty("undisturbed-reference"), runs.empty("killed-reference")
    train_generation(undisturbed, job, Layout(2, 3))
    with pytest.raises(GroupFailedError, match="status 9"):
        train_generation(killed, job, Layout(2, 3), KilledInReferencePass)
    stored, parts = times_of_writing(killed), len(reference_files(undisturbed))
    assert 0 < len(stored) < parts
    train_generation(killed, job, after)
    log = killed.generation_logs(2).worker(0).read_text()
    assert log.count("are to be computed") == -(-(parts - len(stored)) // after.world_size)
    assert f"reference model: {parts - len(stored)} of {parts} parts are to be computed" in log
    assert stored.items() <= times_of_writing(killed).items(), "they are not written again"
    assert contents(killed) == contents(undisturbed)
    assert losses(killed) == pytest.approx(losses(undisturbed), rel=1e-5)


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("dpo", Layout(2, 1)),
        ("dpo", Layout(2, 3)),
        ("kto", Layout(2, 1)),
        ("kto", Layout(2, 3)),
    ],
    ids=str,
)
@pytest.mark.long
def test_the_reference_of_an_adapter_is_its_base(tmp_path: Path, runs: Runs, objective: str, layout: Layout) -> None:
    job = preference_job(tmp_path, objective, adapter=ADAPTER, checkpoint={"every": HALF, "keep": 3})
    undisturbed = runs.empty(f"finished-adapter-{objective}")
    train_generation(undisturbed, job, layout)
    first, *_, last = surviving_steps(undisturbed)
    rewards = [name for name in first if name in ("kl", "rewardMargin", "rewardChosen", "rewardRejected")]
    assert len(rewards) >= 3
    assert [first[name] for name in rewards] == pytest.approx([0.0] * len(rewards), abs=1e-4)
    assert last["rewardMargin"] > 1e-3, "the adapter left its base"

    bare = job.model_dump(mode="json", exclude_unset=True)
    del bare["spec"]["adapter"]
    bare["spec"]["training"] |= {"maxSteps": 1, "warmupSteps": 0}
    without = runs.empty(f"bare-{objective}")
    train_generation(without, FinetuneJob.model_validate(bare), Layout(1, 0))
    assert contents(without) == contents(undisturbed)

    resumed = runs.interrupted(undisturbed, HALF)
    train_generation(resumed, job, layout)
    ends_alike(resumed, undisturbed)


@pytest.mark.long
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


@pytest.mark.long
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


def ends_alike(resumed: JobDirectory, undisturbed: JobDirectory) -> None:
    """Check that two runs have the same losses, and the same weights and moments at the end, bit for bit."""
    expected, found = committed_state(undisturbed, STEPS), committed_state(resumed, STEPS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert losses(resumed) == losses(undisturbed)


def times_of_writing(directory: JobDirectory) -> dict[str, int]:
    """When each file with log-probabilities was written, in nanoseconds, by its name; empty if there is none."""
    return {path.name: path.stat().st_mtime_ns for path in directory.reference.glob("*/*.npy")}


def contents(directory: JobDirectory) -> list[bytes]:
    """The reference model's log-probabilities of all pairs, as bytes."""
    return [path.read_bytes() for path in reference_files(directory)]


def reference_files(directory: JobDirectory) -> list[Path]:
    """The files with the reference model's log-probabilities."""
    found = sorted(directory.reference.glob("*/*.npy"))
    assert found
    return found
