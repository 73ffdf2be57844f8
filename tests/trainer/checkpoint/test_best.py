"""The checkpoint of the best evaluation is kept, and found again; a lost one is never replaced silently."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from spotune.job import BestSpec
from spotune_trainer import files
from spotune_trainer.checkpoint.best import BestCheckpoint, find_best_checkpoint
from spotune_trainer.checkpoint.evaluations import Evaluation, best_evaluation
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import MANIFEST, Checkpoint, CheckpointName, list_checkpoints
from spotune_trainer.checkpoint.writer import prune
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import commit_checkpoint

BEST = BestSpec(metric="loss")
LOSSES = {5: 4.0, 10: 2.0, 15: 3.0, 20: 2.5, 25: 2.6}


def history(*steps: int) -> tuple[Evaluation, ...]:
    return tuple(Evaluation(step, 100, LOSSES[step]) for step in steps)


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    """Generation 1 has committed after every evaluation of `LOSSES`; each checkpoint has the evaluations up to it."""
    directory = JobDirectory(tmp_path)
    claim(directory, None)
    for step in LOSSES:
        commit_checkpoint(directory, step, 1, evaluations=history(*(each for each in LOSSES if each <= step)))
    return directory


def kept(directory: JobDirectory) -> list[int]:
    return [each.name.step for each in list_checkpoints(directory.checkpoints) if isinstance(each, Checkpoint)]


def test_the_best_is_kept_beside_the_newest(directory: JobDirectory) -> None:
    prune(directory, 1, keep=2, best=BEST)
    assert kept(directory) == [10, 20, 25]
    prune(directory, 1, keep=1)
    assert kept(directory) == [25], "without best, only the newest"


def test_a_best_that_was_replaced_is_deleted_once_no_kept_checkpoint_needs_it(directory: JobDirectory) -> None:
    """A run may resume from any of the newest ones. The best before it must still exist then."""
    prune(directory, 1, keep=2, best=BEST)
    better = (*history(5, 10, 15, 20, 25), Evaluation(30, 100, 1.0))
    commit_checkpoint(directory, 30, 1, evaluations=better)
    prune(directory, 1, keep=2, best=BEST)
    assert kept(directory) == [10, 25, 30], "step 25 still has step 10 as its best"
    commit_checkpoint(directory, 35, 1, evaluations=better)
    prune(directory, 1, keep=2, best=BEST)
    assert kept(directory) == [30, 35]


def test_a_checkpoint_before_its_own_evaluation_keeps_the_earlier_best(directory: JobDirectory) -> None:
    """The commit of a step may be complete before the evaluation after that step."""
    commit_checkpoint(directory, 30, 1, evaluations=history(5, 10, 15, 20, 25))
    prune(directory, 1, keep=1, best=BEST)
    assert kept(directory) == [10, 30]


@pytest.mark.parametrize("seed", range(8))
def test_one_checkpoint_more_than_keep_is_enough_for_the_best(tmp_path: Path, seed: int) -> None:
    """Each evaluation that is the best is committed, as a worker group does, and other steps at random."""
    random, directory, keep = Random(seed), JobDirectory(tmp_path), 1 + seed % 3
    claim(directory, None)
    done: tuple[Evaluation, ...] = ()
    for step in range(1, 25):
        commits_first, evaluates = random.random() < 0.4, random.random() < 0.5
        if commits_first:
            commit_checkpoint(directory, step, 1, evaluations=done)
            prune(directory, 1, keep, best=BEST)
        if evaluates:
            done = (*done, Evaluation(step, 100, random.random()))
            if best_evaluation(done, BEST) == done[-1] and not commits_first:
                commit_checkpoint(directory, step, 1, evaluations=done)
                prune(directory, 1, keep, best=BEST)
        best = best_evaluation(done, BEST)
        assert len(kept(directory)) <= keep + 1
        assert best is None or best.step in kept(directory)


def test_a_damaged_manifest_does_not_stop_the_pruning(directory: JobDirectory) -> None:
    files.write_text(directory.checkpoints / "step-00000025.gen-1" / MANIFEST, "{}")
    prune(directory, 1, keep=2, best=BEST)
    assert kept(directory) == [10, 20]


def test_the_best_checkpoint_is_found(directory: JobDirectory) -> None:
    found = find_best_checkpoint(directory, history(*LOSSES), BEST)
    assert found.checkpoint is not None
    assert (found.checkpoint.name.step, found.unusable) == (10, ())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("lost", "the checkpoint of step 10 is not kept"),
        ("torn", "the checkpoint of step 10 is damaged: rank-00000.safetensors has"),
        ("changed", "the checkpoint of step 10 is damaged: rank-00000.safetensors has checksum"),
    ],
)
def test_the_next_best_is_found_with_the_reason_if_the_best_is_unusable(
    directory: JobDirectory, damage: str, reason: str
) -> None:
    folder = directory.checkpoints / "step-00000010.gen-1"
    path = folder / "rank-00000.safetensors"
    content = path.read_bytes()
    if damage == "lost":
        shutil.rmtree(folder)
    else:
        path.write_bytes(content[:-9] if damage == "torn" else content[:-9] + bytes(9))
    found = find_best_checkpoint(directory, history(*LOSSES), BEST)
    assert found.checkpoint is not None
    assert found.checkpoint.name.step == 20
    assert found.unusable[0].startswith(reason)


def test_checkpoints_of_a_lost_generation_are_not_the_best(directory: JobDirectory) -> None:
    """Generation 2 started from step 5 and repeated step 10: only its own checkpoint of that step counts."""
    claim(directory, CheckpointName(5, 1))
    found = find_best_checkpoint(directory, history(5, 10), BEST)
    assert found.checkpoint is not None
    assert found.checkpoint.name == CheckpointName(5, 1)
    again = commit_checkpoint(directory, 10, 2, evaluations=history(5, 10))
    found = find_best_checkpoint(directory, history(5, 10), BEST)
    assert found.checkpoint is not None
    assert found.checkpoint.name == again


def test_nothing_is_found_without_a_value_or_without_a_checkpoint(directory: JobDirectory) -> None:
    assert find_best_checkpoint(directory, (Evaluation(10, 100, None),), BEST) == BestCheckpoint(None, ())
    reason = "the checkpoint of step 12 is not kept"
    assert find_best_checkpoint(directory, (Evaluation(12, 100, 1.0),), BEST) == BestCheckpoint(None, (reason,))
