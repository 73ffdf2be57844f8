"""Restarts: a group resumes exactly from the last commit, despite zombies, torn files and corrupt checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from spotune.prompting.export_manifest import ExportManifest, previous_export, previous_exports
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim, surviving_steps
from spotune_trainer.checkpoint.layout import MANIFEST, CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.training.task import RankExit
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import (
    STEPS,
    STEPS_PER_EPOCH,
    Layout,
    Runs,
    committed,
    committed_state,
    losses,
    make_task,
    once_per_epoch,
    rank_error,
    sample_hashes,
    start_generation,
    train_generation,
    train_rank,
)

pytestmark = pytest.mark.slow

ALONE = Layout(1, 0)
FP32 = 1e-6


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (Layout(2, 0), "float32"),
        (Layout(2, 1), "float32"),
        (Layout(2, 2), "float32"),
        (Layout(2, 3), "float32"),
        (Layout(2, 2), "bfloat16"),
    ],
    ids=str,
)
def test_resuming_at_the_same_layout_is_bit_identical(runs: Runs, layout: Layout, dtype: str) -> None:
    undisturbed = runs.finished(layout, dtype=dtype)
    resumed = runs.interrupted(undisturbed, step=5)
    train_generation(resumed, runs.job(dtype=dtype), layout)
    assert [record["generation"] for record in surviving_steps(resumed)] == [1] * 5 + [2] * 5
    assert sample_hashes(resumed) == sample_hashes(undisturbed)
    assert losses(resumed) == losses(undisturbed)
    found, expected = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert committed(resumed, STEPS).name.generation == 2
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    weights = "model.safetensors"
    assert (resumed.export / weights).read_bytes() == (undisturbed.export / weights).read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [(Layout(2, 2), Layout(3, 3)), (Layout(2, 3), Layout(1, 0)), (Layout(5, 0), Layout(2, 1))],
    ids=str,
)
def test_resuming_at_another_layout_keeps_samples_and_losses(runs: Runs, before: Layout, after: Layout) -> None:
    undisturbed = runs.finished(before)
    resumed = runs.interrupted(undisturbed, step=5)
    train_generation(resumed, runs.job(), after)
    assert [record["worldSize"] for record in surviving_steps(resumed)] == [before.world_size] * 5 + [
        after.world_size
    ] * 5
    assert once_per_epoch(runs, resumed)
    assert sample_hashes(resumed) == sample_hashes(undisturbed)
    assert losses(resumed) == pytest.approx(losses(undisturbed), rel=FP32)


def test_stop_notice_commits_at_once_and_no_step_is_lost(runs: Runs) -> None:
    layout = Layout(2, 1)
    directory = runs.empty("noticed")
    write_notice(directory.notice, seconds=30, stop=True, reason="spot")
    assert train_generation(directory, runs.job(), layout).exit is RankExit.STOPPED
    stopped_at = len(losses(directory))
    assert stopped_at < STEPS
    assert [path.name for path in directory.checkpoints.iterdir()] == [str(CheckpointName(stopped_at, 1))]
    directory.notice.unlink()
    assert train_generation(directory, runs.job(), layout).exit is RankExit.TRAINED
    undisturbed = runs.finished(layout)
    assert losses(directory) == losses(undisturbed)
    assert sample_hashes(directory) == sample_hashes(undisturbed)


def test_group_that_yields_commits_and_the_next_group_resumes_there(runs: Runs) -> None:
    before, after = Layout(2, 1), Layout(3, 2)
    directory = runs.empty("leaving")
    logs = directory.generation_logs(1)
    logs.root.mkdir(parents=True)
    write_notice(logs.notice, seconds=None, reason="there are slots for 3 workers, 2 train", leave=True)
    assert train_generation(directory, runs.job(), before).exit is RankExit.YIELDED
    yielded_at = len(losses(directory))
    assert 0 < yielded_at < STEPS
    assert train_generation(directory, runs.job(), after).exit is RankExit.TRAINED
    sizes = [record["worldSize"] for record in surviving_steps(directory)]
    assert sizes == [2] * yielded_at + [3] * (STEPS - yielded_at)
    assert once_per_epoch(runs, directory)
    undisturbed = runs.finished(before)
    assert sample_hashes(directory) == sample_hashes(undisturbed)
    assert losses(directory) == pytest.approx(losses(undisturbed), rel=FP32)


def test_run_with_more_epochs_continues_after_the_last_step(runs: Runs) -> None:
    """`epochs` may grow. A constant learning rate makes both schedules equal. The first model is kept."""
    constant = {"scheduler": "constant", "warmupSteps": 0}
    longer, resumed = runs.empty("longer"), runs.empty("resumed")
    train_generation(longer, runs.job(training=constant), ALONE)
    train_generation(resumed, runs.job(training={**constant, "epochs": 1}), ALONE)
    first = (resumed.export / "model.safetensors").read_bytes()
    steps = len(losses(resumed))
    train_generation(resumed, runs.job(training=constant), ALONE)
    assert losses(resumed) == losses(longer)
    assert {step: path.name for step, path in previous_exports(resumed.export).items()} == {
        steps: f"previous-export-step-{steps}"
    }
    assert (previous_export(resumed.export, steps) / "model.safetensors").read_bytes() == first
    assert ExportManifest.read(resumed.export).step == STEPS


def test_interrupted_export_is_repeated_without_training(runs: Runs) -> None:
    finished = runs.finished(Layout(2, 1))
    again = runs.interrupted(finished, step=STEPS)
    shutil.rmtree(again.export)
    result = train_generation(again, runs.job(), Layout(2, 1))
    assert surviving_steps(again) == surviving_steps(finished)
    assert result.summary["steps"] == STEPS
    weights = "model.safetensors"
    assert (again.export / weights).read_bytes() == (finished.export / weights).read_bytes()


def recorded_failure(directory: JobDirectory, generation: int, rank: int) -> dict[str, Any]:
    failure = files.read_json(directory.generation_logs(generation).failure(rank))
    assert isinstance(failure, dict)
    return failure


def test_superseded_group_changes_nothing_and_exits_at_its_next_commit(runs: Runs) -> None:
    """Generation 1 still runs as a zombie after generation 2 has started from the beginning and finished."""
    directory, job = runs.empty("zombie"), runs.job()
    zombie = claim(directory, None)
    successor = claim(directory, None)
    run_group(2, train_rank, make_task(directory, job, Layout(2, 1), successor))
    before = visible_state(directory)
    zombies = run_group(1, rank_error, make_task(directory, job, ALONE, zombie))
    assert zombies[0].startswith("SupersededError: generation 1 was superseded")
    assert recorded_failure(directory, 1, 0)["kind"] == "SupersededError"
    assert len((directory.generation_logs(1).steps).read_text().splitlines()) == STEPS_PER_EPOCH, (
        "the zombie trained up to its next commit"
    )
    assert visible_state(directory) == before
    assert losses(directory) == pytest.approx(losses(runs.finished(Layout(2, 1))), abs=0)


def test_late_commits_of_a_superseded_group_are_ignored(runs: Runs) -> None:
    """A zombie may commit after its last check of the fence. No lineage contains that checkpoint."""
    layout = Layout(2, 1)
    undisturbed = runs.finished(layout)
    directory = runs.interrupted(undisturbed, step=5)
    successor = start_generation(directory)
    late = "step-00000010.gen-1"
    shutil.copytree(undisturbed.checkpoints / late, directory.checkpoints / late)
    choice = choose_checkpoint(directory)
    assert choice.checkpoint is not None
    assert str(choice.checkpoint.name) == "step-00000005.gen-1"
    assert choice.skipped == ()
    run_group(2, train_rank, make_task(directory, runs.job(), layout, successor))
    choice = choose_checkpoint(directory)
    assert choice.checkpoint is not None
    assert str(choice.checkpoint.name) == "step-00000010.gen-2"
    assert not (directory.checkpoints / late).exists(), "the successor deletes it at its own commit"


def test_truncated_checkpoint_is_skipped_with_its_reason(runs: Runs) -> None:
    directory = runs.interrupted(runs.finished(Layout(2, 2)), step=STEPS)
    newest = directory.checkpoints / "step-00000010.gen-1" / "rank-00001.safetensors"
    size = newest.stat().st_size
    os.truncate(newest, size - 100)
    choice = choose_checkpoint(directory)
    assert choice.checkpoint is not None
    assert str(choice.checkpoint.name) == "step-00000005.gen-1"
    reasons = [(str(each.name), each.reason) for each in choice.skipped]
    text = f"rank-00001.safetensors has {size - 100} bytes, its manifest records {size}"
    assert reasons == [("step-00000010.gen-1", text)]
    train_generation(directory, runs.job(), Layout(2, 2))
    assert losses(directory) == losses(runs.finished(Layout(2, 2)))


def test_checkpoint_with_a_flipped_bit_is_rejected_by_all_ranks(runs: Runs) -> None:
    directory = runs.interrupted(runs.finished(Layout(2, 2)), step=STEPS)
    flip_bit(directory.checkpoints / "step-00000010.gen-1" / "rank-00000.safetensors")
    generation = start_generation(directory)
    assert str(generation.restored) == "step-00000010.gen-1"
    errors = run_group(3, rank_error, make_task(directory, runs.job(), Layout(3, 2), generation))
    assert len(set(errors)) == 1
    assert errors[0].startswith("CorruptCheckpointError: checkpoint step-00000010.gen-1 is corrupt: rank-00000.saf")
    named = {recorded_failure(directory, generation.number, rank)["checkpoint"] for rank in range(3)}
    assert named == {"step-00000010.gen-1"}
    refused = choose_checkpoint(directory, [CheckpointName(10, 1)]).checkpoint
    assert refused is not None
    assert str(refused.name) == "step-00000005.gen-1"


def visible_state(directory: JobDirectory) -> dict[str, object]:
    """All state that a later generation or a user reads."""
    choice = choose_checkpoint(directory)
    assert choice.checkpoint is not None
    read = [*choice.checkpoint.path.iterdir(), *directory.export.iterdir()]
    return {
        "steps": surviving_steps(directory),
        "checkpoints": sorted(path.parent.name for path in directory.checkpoints.glob(f"*/{MANIFEST}")),
        **{str(path): path.read_bytes() for path in read},
    }


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file, as a failing disk would."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
