"""Runs on packed pairs: the losses of the same pairs unpacked at any world size, exact resumes, evaluations by pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.shards import ShardedDataset
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.preference import PAIRS, preference_job
from tests.trainer.support.runs import Layout, Runs, committed_state, losses, train_generation

pytestmark = pytest.mark.slow

STEPS = 6
HALF = STEPS // 2
WHOLE = {"epochs": STEPS, "globalBatchSize": PAIRS, "warmupSteps": 2}
"""A step has all rows, so packed and single pairs make the same steps."""


def packed_job(root: Path, objective: str, *, packing: bool = True, **sections: Any) -> FinetuneJob:
    """A job on pairs in rows of 512 tokens, or of one pair each; shards and model are written to `root`."""
    dataset = {"packing": packing, "maxLength": 256, **sections.pop("dataset", {})}
    training = {**WHOLE, **sections.pop("training", {})}
    checkpoint = {"every": STEPS, **sections.pop("checkpoint", {})}
    return preference_job(root, objective, dataset=dataset, training=training, checkpoint=checkpoint, **sections)


@pytest.mark.parametrize(
    ("objective", "layouts"),
    [
        ("dpo", [Layout(1, 0), Layout(2, 0), Layout(2, 3)]),
        pytest.param("orpo", [Layout(2, 3)], marks=pytest.mark.long),
        pytest.param("simpo", [Layout(1, 3)], marks=pytest.mark.long),
    ],
)
def test_steps_equal_those_of_single_pairs(tmp_path: Path, runs: Runs, objective: str, layouts: list[Layout]) -> None:
    single = runs.empty("single")
    train_generation(single, packed_job(tmp_path / "single", objective, packing=False), Layout(1, 0))
    expected, job = list(surviving_steps(single)), packed_job(tmp_path / "packed", objective)
    for layout in layouts:
        packed = runs.empty(f"packed-{layout.world_size}-{layout.zero_stage}")
        train_generation(packed, job, layout)
        found = list(surviving_steps(packed))
        assert losses(packed) == pytest.approx(losses(single), rel=1e-6)
        assert losses(packed)[-1] < 0.99 * losses(packed)[0], "the weights moved far enough for a difference to show"
        for name in ("tokens", "labelTokens", "rewardChosen", "rewardRejected", "rewardMargin"):
            assert [step[name] for step in found] == pytest.approx(
                [step[name] for step in expected], rel=1e-4, abs=1e-5
            )
        assert found[-1]["rewardAccuracy"] == expected[-1]["rewardAccuracy"]


def test_a_run_on_packed_pairs_resumes_exactly(tmp_path: Path, runs: Runs) -> None:
    training = {"globalBatchSize": 4, "epochs": None, "maxSteps": STEPS}
    job = packed_job(tmp_path, "dpo", training=training, checkpoint={"every": HALF, "keep": 3})
    undisturbed = runs.empty("finished-packed")
    train_generation(undisturbed, job, Layout(2, 1))
    resumed = runs.interrupted(undisturbed, HALF)
    train_generation(resumed, job, Layout(2, 1))
    expected, found = committed_state(undisturbed, STEPS), committed_state(resumed, STEPS)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert losses(resumed) == losses(undisturbed)
    of_step = {step["samples"] for step in surviving_steps(undisturbed)}
    other = runs.empty("other-world")
    train_generation(other, job, Layout(1, 0))
    assert {step["samples"] for step in surviving_steps(other)} == of_step, "the rows of each step"
    assert losses(other) == pytest.approx(losses(undisturbed), rel=1e-5)


@pytest.mark.long
def test_the_reference_of_packed_pairs_is_the_same_at_any_world_size(tmp_path: Path, runs: Runs) -> None:
    training = {"epochs": None, "maxSteps": 1, "warmupSteps": 0}
    job = packed_job(tmp_path, "dpo", dataset={"maxLength": 96}, training=training)
    found = []
    for layout in (Layout(1, 0), Layout(2, 3)):
        directory = runs.empty(f"reference-{layout.world_size}")
        train_generation(directory, job, layout)
        found.append([path.read_bytes() for path in sorted(directory.reference.glob("*/*.npy"))])
    rows = len(ShardedDataset(str(tmp_path / "shards"), tmp_path / "cache"))
    assert 16 < rows < PAIRS
    assert len(found[0]) == -(-rows // 16), "parts of 16 rows, the last one shorter"
    assert found[0] == found[1]


@pytest.mark.long
def test_evaluations_are_means_over_pairs(tmp_path: Path, runs: Runs) -> None:
    """Rows of one to several pairs are evaluated; a mean of rows would differ."""
    found = []
    for packing in (False, True):
        root = tmp_path / str(packing)
        dataset = {"eval": {"source": str(root / "shards")}}
        job = packed_job(root, "dpo", packing=packing, dataset=dataset)
        summary = train_generation(runs.empty(f"evaluated-{packing}"), job, Layout(2, 3)).summary
        found.append({"loss": summary["evalLoss"], **summary["scores"]})
    assert found[0]["rewardAccuracy"] > 0.9
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[1]["loss"] < np.log(2), "the loss of a model that prefers neither answer"


@pytest.mark.long
def test_held_out_rows_of_packed_pairs_are_evaluated(tmp_path: Path, runs: Runs) -> None:
    dataset = {"eval": {"fraction": 0.25, "seed": 1}, "maxLength": 96}
    job = packed_job(tmp_path, "simpo", dataset=dataset, training={"evaluation": {"everySteps": HALF}})
    scores = train_generation(runs.empty("held-out"), job, Layout(1, 0)).summary["scores"]
    assert scores["rewardMargin"] == pytest.approx(scores["rewardChosen"] - scores["rewardRejected"], abs=1e-6)
    assert 0 <= scores["rewardAccuracy"] <= 1


@pytest.mark.long
def test_packed_and_single_pairs_may_be_mixed(tmp_path: Path, runs: Runs) -> None:
    folders = {"packed": tmp_path / "packed", "single": tmp_path / "single"}
    jobs = [packed_job(folder, "dpo", packing=name == "packed") for name, folder in folders.items()]
    job = jobs[0].model_dump(mode="json", exclude_none=True)
    sources = [{"name": name, "train": {"source": str(folder / "shards")}} for name, folder in folders.items()]
    job["spec"]["dataset"] = {"mixture": sources, "maxLength": 256}
    steps = []
    for layout in (Layout(1, 0), Layout(2, 3)):
        directory = runs.empty(f"mixed-{layout.world_size}")
        train_generation(directory, FinetuneJob.model_validate(job), layout)
        steps.append(list(surviving_steps(directory)))
    assert [step["samples"] for step in steps[0]] == [step["samples"] for step in steps[1]]
    for name in ("loss", "rewardMargin"):
        assert [step[name] for step in steps[0]] == pytest.approx([step[name] for step in steps[1]], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (
            "reward",
            "has packed pairs, and reward scores each answer in a row of its own: write the shards with packing",
        ),
        ("sft", "has pairs of chosen and rejected answers, and sft would learn both"),
        ("kto", "kto learns from answers with a label, and .* has none"),
    ],
)
def test_objectives_that_do_not_learn_from_packed_pairs_refuse_them(
    tmp_path: Path, runs: Runs, objective: str, message: str
) -> None:
    job = packed_job(tmp_path, "dpo").model_dump(mode="json", exclude_none=True)
    job["spec"]["dataset"] = {"train": {"source": str(tmp_path / "shards")}}
    job["spec"]["training"] |= {"objective": objective, "preference": {}}
    with pytest.raises(GroupFailedError, match=message):
        train_generation(runs.empty("refused"), FinetuneJob.model_validate(job), Layout(1, 0))
