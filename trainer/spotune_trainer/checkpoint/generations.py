"""Generations: the fence that keeps a lost worker group from changing anything the next one reads.

Every start of a worker group claims the next generation: a folder made elsewhere, complete with the checkpoint that
the group starts from, and renamed to `generations/<n>` (renaming onto a folder that is not empty fails, on NFS too,
so a number is claimed once and never seen half-made). A checkpoint counts only if no later generation started from
something older than it. A zombie that goes on training can thus write what it likes: it is not in the lineage.
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune.errors import SupersededError
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, Torn, list_checkpoints
from spotune_trainer.job_directory.layout import JobDirectory

_RESTORED = "restored.json"


@dataclass(frozen=True)
class Generation:
    """One start of a worker group and the checkpoint it started from (None: from the beginning)."""

    number: int
    restored: CheckpointName | None

    @property
    def first_step(self) -> int:
        """Optimizer steps that were done when it started."""
        return self.restored.step if self.restored else 0


@dataclass(frozen=True)
class Choice:
    """What to resume from, and what was passed over on the way to it, newest first."""

    checkpoint: Checkpoint | None
    skipped: tuple[Torn, ...]


def list_generations(directory: JobDirectory) -> list[Generation]:
    """All generations of the job, oldest first."""
    if not directory.generations.is_dir():
        return []
    numbers = sorted(int(path.name) for path in directory.generations.iterdir() if path.name.isdigit())
    return [_read(directory.generations / f"{number:07d}") for number in numbers]


def latest_generation(directory: JobDirectory) -> int:
    """Number of the newest generation, 0 before the first."""
    return max((generation.number for generation in list_generations(directory)), default=0)


def is_superseded(directory: JobDirectory, generation: int) -> bool:
    """Whether a later generation has started."""
    return latest_generation(directory) > generation


def refuse_superseded(directory: JobDirectory, generation: int) -> None:
    """Write nothing that others read once a later worker group has started.

    Raises:
        SupersededError: one has.
    """
    if is_superseded(directory, generation):
        raise SupersededError(f"generation {generation} was superseded by a later one of this job; nothing was saved")


def claim(directory: JobDirectory, restored: CheckpointName | None) -> Generation:
    """Claim the next generation, which starts from `restored`; safe against any number of claimants."""
    directory.generations.mkdir(parents=True, exist_ok=True)
    number = latest_generation(directory)
    draft = directory.generations / f".claim-{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    while True:
        number += 1
        generation = Generation(number, restored)
        files.write_json(draft / _RESTORED, _to_json(generation))
        try:
            draft.rename(directory.generations / f"{number:07d}")
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            continue
        files.fsync_directory(directory.generations)
        return generation


def steps_done(directory: JobDirectory, generation: int, first_step: int) -> int:
    """The last step that a generation logged, or the one it started from."""
    lines = files.read_lines(directory.generation_logs(generation).steps)
    return max((line["step"] for line in lines), default=first_step)


def in_lineage(name: CheckpointName, generations: Iterable[Generation]) -> bool:
    """Whether a checkpoint counts: no later generation started from something older than it."""
    return all(later.first_step >= name.step for later in generations if later.number > name.generation)


def choose_checkpoint(directory: JobDirectory, refused: Iterable[CheckpointName] = ()) -> Choice:
    """The newest checkpoint to resume from.

    Args:
        directory: the job's folder.
        refused: names of checkpoints that were found corrupt while they were read.
    """
    generations = list_generations(directory)
    refused = set(refused)
    skipped: list[Torn] = []
    for found in reversed(list_checkpoints(directory.checkpoints)):
        if found.name in refused or not in_lineage(found.name, generations):
            continue
        if isinstance(found, Checkpoint):
            return Choice(found, tuple(skipped))
        if found.committed:
            skipped.append(found)
    return Choice(None, tuple(skipped))


def surviving_steps(directory: JobDirectory) -> list[dict[str, Any]]:
    """The step records that led to the newest generation's state, in order of steps, each step once.

    Follows the newest generation back to what it started from: of an older generation only the steps up to the
    checkpoint that its successor restored count.
    """
    return steps_after(directory, 0)


def steps_after(directory: JobDirectory, first: int) -> list[dict[str, Any]]:
    """Those of the surviving steps that come after step `first`; reads no more generations than hold any."""
    by_number = {generation.number: generation for generation in list_generations(directory)}
    records: list[dict[str, Any]] = []
    current = by_number.get(max(by_number, default=0))
    end: int | None = None
    while current is not None and (end is None or end > first):
        logs = directory.generation_logs(current.number)
        steps = (line for line in files.read_lines(logs.steps) if end is None or line["step"] <= end)
        records[:0] = [line for line in steps if line["step"] > first]
        end = current.first_step
        current = by_number.get(current.restored.generation) if current.restored else None
    return records


def _read(path: Path) -> Generation:
    value = files.read_json(path / _RESTORED)
    if value is None:
        raise ValueError(f"{path} has no {_RESTORED}: it was not made by spotune")
    name = value["checkpoint"]
    return Generation(int(path.name), CheckpointName.parse(name) if name else None)


def _to_json(generation: Generation) -> dict[str, Any]:
    return {
        "generation": generation.number,
        "checkpoint": str(generation.restored) if generation.restored else None,
        "step": generation.first_step,
        "time": time.time(),
    }
