"""The checkpoints of a job as people look at them: which are there, what each is good for, and which one is meant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from spotune.errors import JobError, UsageError
from spotune_trainer.checkpoint.generations import Generation, in_lineage, list_generations
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, Torn, list_checkpoints
from spotune_trainer.job_directory.layout import JobDirectory


class State(StrEnum):
    """What a checkpoint is good for."""

    WHOLE = "whole"
    """Committed, and a run may go on from it."""
    SUPERSEDED = "superseded"
    """Committed by a worker group that was given up; nothing goes on from it."""
    UNFINISHED = "unfinished"
    """Never committed: being written, or left by a kill; nothing goes on from it."""
    DAMAGED = "damaged"
    """Committed, but its files are no longer what was written."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint's folder.

    Attributes:
        name: step and generation.
        state: what it is good for.
        reason: what is wrong with it; empty for whole ones.
        checkpoint: its manifest; None where that cannot be read.
    """

    name: CheckpointName
    state: State
    reason: str
    checkpoint: Checkpoint | None

    def damaged(self, reason: str) -> Entry:
        """The same checkpoint, found to be damaged."""
        return replace(self, state=State.DAMAGED, reason=reason)

    def as_json(self) -> dict[str, Any]:
        """With camelCase keys; None where the manifest cannot be read. `time` is in seconds since the epoch."""
        manifest = self.checkpoint.manifest if self.checkpoint else None
        return {
            "name": str(self.name),
            "step": self.name.step,
            "generation": self.name.generation,
            "state": self.state.value,
            "reason": self.reason,
            "time": manifest.time if manifest else None,
            "worldSize": manifest.world_size if manifest else None,
            "zeroStage": manifest.zero_stage if manifest else None,
            "bytes": self.checkpoint.bytes if self.checkpoint else None,
        }


def list_entries(directory: JobDirectory) -> list[Entry]:
    """All checkpoints of a job, oldest step first; their files' contents are not read.

    Raises:
        UsageError: it is not the directory of a run.
    """
    if not directory.root.is_dir():
        raise UsageError(f"there is no directory {directory.root}.")
    if not directory.job.exists():
        raise UsageError(f"{directory.root} is not the directory of a run: there is no {directory.job.name} in it.")
    generations = list_generations(directory)
    return [_entry(found, generations) for found in list_checkpoints(directory.checkpoints)]


def choose(entries: list[Entry], step: int | None) -> Checkpoint:
    """The newest whole checkpoint, of a step if one is named.

    Raises:
        UsageError: there is none.
        JobError: there is one of this step, but it is damaged.
    """
    candidates = [entry for entry in entries if step in (None, entry.name.step)]
    whole = [entry.checkpoint for entry in candidates if entry.state is State.WHOLE and entry.checkpoint]
    if whole:
        return whole[-1]
    steps = ", ".join(str(entry.name.step) for entry in entries if entry.state is State.WHOLE) or "none"
    damaged = [entry for entry in candidates if entry.state is State.DAMAGED]
    if damaged:
        raise JobError(
            f"checkpoint {damaged[-1].name} is damaged: {damaged[-1].reason}. Whole ones are of step: {steps}."
        )
    what = "no whole checkpoint yet" if step is None else f"no whole checkpoint of step {step}"
    raise UsageError(f"there is {what}; there are whole ones of step: {steps}.")


def _entry(found: Checkpoint | Torn, generations: list[Generation]) -> Entry:
    if isinstance(found, Torn):
        state = State.DAMAGED if found.committed else State.UNFINISHED
        return Entry(found.name, state, found.reason, None)
    if not in_lineage(found.name, generations):
        reason = "a later worker group went on from something older"
        return Entry(found.name, State.SUPERSEDED, reason, found)
    return Entry(found.name, State.WHOLE, "", found)
