"""Find the checkpoint of the best evaluation on the volume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotune.job import BestSpec
from spotune_trainer.checkpoint.evaluations import Evaluation, by_value
from spotune_trainer.checkpoint.generations import in_lineage, list_generations
from spotune_trainer.checkpoint.layout import Checkpoint, UnusableCheckpoint, list_checkpoints
from spotune_trainer.checkpoint.reader import CorruptCheckpointError, fetch, verify
from spotune_trainer.job_directory.layout import JobDirectory


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint that is whole.

    Attributes:
        checkpoint: its folder and manifest; None if no evaluation with a value has a whole one.
        unusable: why each better evaluation has no usable checkpoint, best first; empty if this is the best one.
    """

    checkpoint: Checkpoint | None
    unusable: tuple[str, ...]


def find_best_checkpoint(
    directory: JobDirectory,
    history: Sequence[Evaluation],
    best: BestSpec,
    heartbeat: Callable[[], None] = lambda: None,
) -> BestCheckpoint:
    """The checkpoint of the best evaluation of `history`, with verified checksums.

    If it is lost or damaged, the checkpoint of the next best evaluation that still has one, and the reason.

    Args:
        directory: the job's folder.
        history: all evaluations of the run.
        best: how evaluations are compared.
        heartbeat: called after each file that was verified.

    Raises:
        UnreadableCheckpointError: the volume failed.
    """
    generations = list_generations(directory)
    found = {
        each.name.step: each for each in list_checkpoints(directory.checkpoints) if in_lineage(each.name, generations)
    }
    unusable: list[str] = []
    for evaluation in by_value(history, best):
        checkpoint = found.get(evaluation.step)
        problem = _problem(checkpoint, heartbeat)
        if problem is None:
            assert isinstance(checkpoint, Checkpoint)
            return BestCheckpoint(checkpoint, tuple(unusable))
        unusable.append(f"the checkpoint of step {evaluation.step} {problem}")
    return BestCheckpoint(None, tuple(unusable))


def _problem(checkpoint: Checkpoint | UnusableCheckpoint | None, heartbeat: Callable[[], None]) -> str | None:
    """Why a checkpoint cannot be used; None if its files have the recorded checksums."""
    if checkpoint is None:
        return "is not kept"
    if isinstance(checkpoint, UnusableCheckpoint):
        return f"is damaged: {checkpoint.reason}"
    try:
        fetch(checkpoint, heartbeat=heartbeat)
        for entry in checkpoint.manifest.files:
            verify(checkpoint, [entry])
            heartbeat()
    except CorruptCheckpointError as error:
        return f"is damaged: {error.reason}"
    return None
