"""List the checkpoints of a job with their states, and select one of them; for `spotune checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from spotune.errors import JobError, UsageError
from spotune_trainer import files
from spotune_trainer.checkpoint.evaluations import best_evaluation
from spotune_trainer.checkpoint.generations import Generation, in_lineage, list_generations
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, UnusableCheckpoint, list_checkpoints
from spotune_trainer.job_directory.job import job_of
from spotune_trainer.job_directory.layout import JobDirectory


class CheckpointState(StrEnum):
    """Whether a checkpoint can be resumed from, and if not, why."""

    WHOLE = "whole"
    """Committed; a run can resume from it."""
    SUPERSEDED = "superseded"
    """Committed by a superseded worker group; no run resumes from it."""
    UNFINISHED = "unfinished"
    """Not committed: still being written, or left by a killed worker group."""
    DAMAGED = "damaged"
    """Committed, but its files are missing or were changed."""


@dataclass(frozen=True)
class CatalogueEntry:
    """One folder of a checkpoint.

    Attributes:
        name: step and generation.
        state: whether it can be resumed from.
        reason: what is wrong with it; empty if it is whole.
        checkpoint: folder and manifest; None if the manifest cannot be read.
        is_best: whether it is that of the best evaluation so far, by `training.evaluation.best` of the job.
    """

    name: CheckpointName
    state: CheckpointState
    reason: str
    checkpoint: Checkpoint | None
    is_best: bool = False

    def as_damaged(self, reason: str) -> CatalogueEntry:
        """The same entry, marked as damaged for this reason."""
        return replace(self, state=CheckpointState.DAMAGED, reason=reason)

    def as_json(self) -> dict[str, Any]:
        """A JSON object with camelCase keys; fields of an unreadable manifest are None. `time` is Unix time."""
        manifest = self.checkpoint.manifest if self.checkpoint else None
        return {
            "name": str(self.name),
            "step": self.name.step,
            "generation": self.name.generation,
            "state": self.state.value,
            "reason": self.reason,
            "best": self.is_best,
            "time": manifest.time if manifest else None,
            "worldSize": manifest.world_size if manifest else None,
            "zeroStage": manifest.zero_stage if manifest else None,
            "bytes": self.checkpoint.bytes if self.checkpoint else None,
        }


def list_entries(directory: JobDirectory) -> list[CatalogueEntry]:
    """All checkpoints of a job, ascending by step. Checks names and sizes of files, not their contents.

    Raises:
        UsageError: `directory` is not the directory of a run.
    """
    if not directory.root.is_dir():
        raise UsageError(f"there is no directory {directory.root}.")
    if not directory.job.exists():
        raise UsageError(f"{directory.root} is not the directory of a run: there is no {directory.job.name} in it.")
    generations = list_generations(directory)
    entries = [_entry(found, generations) for found in list_checkpoints(directory.checkpoints)]
    best = _best_step(directory, entries)
    counts = (CheckpointState.WHOLE, CheckpointState.DAMAGED)
    return [replace(entry, is_best=entry.name.step == best and entry.state in counts) for entry in entries]


def select_checkpoint(entries: list[CatalogueEntry], step: int | None) -> Checkpoint:
    """The newest whole checkpoint, or the newest of a given step.

    Raises:
        UsageError: there is none.
        JobError: the one of this step is damaged.
    """
    candidates = [entry for entry in entries if step in (None, entry.name.step)]
    whole = [entry.checkpoint for entry in candidates if entry.state is CheckpointState.WHOLE and entry.checkpoint]
    if whole:
        return whole[-1]
    steps = ", ".join(str(entry.name.step) for entry in entries if entry.state is CheckpointState.WHOLE)
    available = f"Steps with a whole checkpoint: {steps or 'none'}."
    damaged = [entry for entry in candidates if entry.state is CheckpointState.DAMAGED]
    if damaged:
        raise JobError(f"checkpoint {damaged[-1].name} is damaged: {damaged[-1].reason}. {available}")
    raise UsageError(f"there is no whole checkpoint {'yet' if step is None else f'of step {step}'}. {available}")


def _best_step(directory: JobDirectory, entries: list[CatalogueEntry]) -> int | None:
    """Step of the best evaluation: of a finished run by its result, else by the newest whole checkpoint."""
    job = job_of(directory)
    best = job.spec.training.evaluation.best if job else None
    whole = [entry.checkpoint for entry in entries if entry.state is CheckpointState.WHOLE and entry.checkpoint]
    if best is None or not whole:
        return None
    result = files.read_json(directory.result)
    if result is not None and result.get("best"):
        return int(result["best"]["step"])
    evaluation = best_evaluation(whole[-1].manifest.evaluations, best)
    return evaluation.step if evaluation else None


def _entry(found: Checkpoint | UnusableCheckpoint, generations: list[Generation]) -> CatalogueEntry:
    if isinstance(found, UnusableCheckpoint):
        state = CheckpointState.DAMAGED if found.committed else CheckpointState.UNFINISHED
        return CatalogueEntry(found.name, state, found.reason, None)
    if not in_lineage(found.name, generations):
        reason = "a later worker group resumed from an older checkpoint"
        return CatalogueEntry(found.name, CheckpointState.SUPERSEDED, reason, found)
    return CatalogueEntry(found.name, CheckpointState.WHOLE, "", found)
