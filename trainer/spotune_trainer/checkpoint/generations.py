"""Generations: the fence between a lost worker group and its successor.

Each start of a worker group claims the next generation number and records the checkpoint that the group starts from.
The claim is atomic: a folder with that record is made under another name and then renamed to `generations/<n>`. A
rename onto a folder that is not empty fails, on NFS too, so each number is claimed once and never visible half-made.
If the storage is a bucket, the claim is a conditional write of the record, and the fence is read in the bucket.

A worker group that is believed lost may still run (a zombie) and may still commit checkpoints. They do not count: a
checkpoint is in the lineage only if no later generation started from an older one. Example: generation 2 starts from
step 10. From then on, whatever generation 1 committed after step 10 is outside of the lineage::

    generation 1   --- step 10 --- step 20 --- step 30 (zombie)     step 10 counts; 20 and 30 do not
                          |
    generation 2          `------- step 15 --- step 25              both count

A zombie deletes nothing once it sees a later claim. What it deletes before that claim, it replaces by a newer commit,
so the driver looks for one after its claim, and withdraws the claim if there is one.
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune.errors import JobError, SupersededError
from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import (
    claim_generation,
    newest_generation,
    remove_record,
    withdraw_generation,
)
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, UnusableCheckpoint, list_checkpoints
from spotune_trainer.job_directory.layout import JobDirectory

_RESTORED = "restored.json"


@dataclass(frozen=True)
class Generation:
    """One start of a worker group and the checkpoint it started from (None: from the beginning)."""

    number: int
    restored: CheckpointName | None

    @property
    def first_step(self) -> int:
        """Optimizer steps that were already done when it started."""
        return self.restored.step if self.restored else 0


@dataclass(frozen=True)
class ResumeChoice:
    """What to resume from.

    Attributes:
        checkpoint: the newest usable checkpoint; None to start from the beginning.
        skipped: newer committed checkpoints that are unusable, newest first.
        corrupt: newer ones that an earlier attempt to read them found corrupt, newest first.
    """

    checkpoint: Checkpoint | None
    skipped: tuple[UnusableCheckpoint, ...]
    corrupt: tuple[CheckpointName, ...] = ()

    def raise_if_all_are_lost(self) -> None:
        """Do not begin again at step 0, whose first commits would delete what may still be repaired.

        Raises:
            JobError: there are committed checkpoints, and none can be used.
        """
        lost = sorted([*(unusable.name for unusable in self.skipped), *self.corrupt])
        if self.checkpoint is None and lost:
            raise JobError(
                f"none of the committed checkpoints can be used: {', '.join(map(str, lost))} (the log has the reasons, "
                "as has `spotune checkpoint verify`). Put back a copy of one, or remove their folders to begin again "
                "at step 0"
            )


def list_generations(directory: JobDirectory) -> list[Generation]:
    """All generations of the job, oldest first."""
    found = (_read(directory.generations / f"{number:07d}") for number in directory.generation_numbers())
    return [generation for generation in found if generation is not None]


def latest_generation(directory: JobDirectory) -> int:
    """Number of the newest generation; 0 before the first."""
    return max(directory.generation_numbers(), default=0)


def is_superseded(directory: JobDirectory, generation: int) -> bool:
    """Whether a later generation has started."""
    bucket = bucket_of(directory)
    newest = latest_generation(directory) if bucket is None else newest_generation(bucket, after=generation)
    return newest > generation


def raise_if_superseded(directory: JobDirectory, generation: int) -> None:
    """Check the fence; call this before writing anything that later generations read.

    Raises:
        SupersededError: a later generation has started.
    """
    if is_superseded(directory, generation):
        raise SupersededError(f"generation {generation} was superseded by a later one of this job; nothing was saved")


def claim(directory: JobDirectory, restored: CheckpointName | None) -> Generation:
    """Claim the next generation, which starts from `restored`. Any number of processes may race for it."""
    bucket = bucket_of(directory)
    if bucket is not None:
        number = claim_generation(bucket, directory, lambda each: _to_json(Generation(each, restored)), _RESTORED)
        return Generation(number, restored)
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


def withdraw(directory: JobDirectory, generation: Generation) -> None:
    """Undo a claim whose group has not started: what older generations have committed counts again."""
    bucket = bucket_of(directory)
    if bucket is not None:
        withdraw_generation(bucket, generation.number)
    remove_record(directory.generations / f"{generation.number:07d}")


def last_logged_step(directory: JobDirectory, generation: int, first_step: int) -> int:
    """The last step that a generation logged; `first_step` if it logged none."""
    path = directory.generation_logs(generation).steps
    with files.reading(path):
        return max((int(line["step"]) for line in files.read_lines(path)), default=first_step)


def steps_lost_after(directory: JobDirectory, step: int) -> int:
    """Number of steps after `step` of the newest generation, whose successor starts from `step`."""
    generations = list_generations(directory)
    if not generations:
        return 0
    return max(0, last_logged_step(directory, generations[-1].number, generations[-1].first_step) - step)


def in_lineage(name: CheckpointName, generations: Iterable[Generation]) -> bool:
    """Whether a checkpoint counts: no later generation started from an older checkpoint."""
    return all(later.first_step >= name.step for later in generations if later.number > name.generation)


def is_newest(
    directory: JobDirectory,
    chosen: Checkpoint | None,
    corrupt: Iterable[CheckpointName] = (),
    claimed: Generation | None = None,
) -> bool:
    """Whether `choose_checkpoint` would still choose this one. Ranks that were given up may have committed meanwhile.

    A claim that starts from an older commit than theirs would put theirs out of the lineage, and they may have deleted
    the older one by then.

    Args:
        directory: the job's folder.
        chosen: the checkpoint that was chosen.
        corrupt: as for `choose_checkpoint`.
        claimed: the generation that starts from `chosen`, if it was claimed already.
    """
    newest = _choose(directory, [each for each in list_generations(directory) if each != claimed], corrupt).checkpoint
    return (newest and newest.name) == (chosen and chosen.name)


def choose_checkpoint(directory: JobDirectory, corrupt: Iterable[CheckpointName] = ()) -> ResumeChoice:
    """Choose the newest checkpoint of the lineage that can be used.

    Args:
        directory: the job's folder.
        corrupt: names of checkpoints that an earlier attempt to read them found corrupt; they are left out.

    Raises:
        JobError: a newer version of spotune has written one that is newer than all that this version can read.
    """
    return _choose(directory, list_generations(directory), corrupt)


def _choose(
    directory: JobDirectory, generations: Sequence[Generation], corrupt: Iterable[CheckpointName]
) -> ResumeChoice:
    corrupt = set(corrupt)
    skipped: list[UnusableCheckpoint] = []
    left_out: list[CheckpointName] = []
    for found in reversed(list_checkpoints(directory.checkpoints)):
        if not in_lineage(found.name, generations):
            continue
        if found.name in corrupt:
            left_out.append(found.name)
        elif isinstance(found, Checkpoint):
            return ResumeChoice(found, tuple(skipped), tuple(left_out))
        elif found.is_newer:
            raise JobError(
                f"a newer version of spotune has written the checkpoint {found.name} ({found.reason}): run that "
                f"version, or move {found.path} elsewhere to continue without it"
            )
        elif found.committed:
            skipped.append(found)
    return ResumeChoice(None, tuple(skipped), tuple(left_out))


def surviving_steps(directory: JobDirectory) -> list[dict[str, Any]]:
    """The step records that led to the newest generation's state: ordered by step, each step once.

    Follows the chain of restored checkpoints back from the newest generation. Of an older generation, only the steps
    up to the checkpoint that its successor restored count, and none that the successor has done again.
    """
    return steps_after(directory, 0)


def steps_after(directory: JobDirectory, after: int) -> list[dict[str, Any]]:
    """The surviving steps later than step `after`. Reads only the logs of generations that can hold any of them."""
    by_number = {generation.number: generation for generation in list_generations(directory)}
    records: list[dict[str, Any]] = []
    current = by_number.get(max(by_number, default=0))
    last: int | None = None  # of the current generation that counts; None: all of them
    while current is not None and (last is None or last > after):
        logs = directory.generation_logs(current.number)
        with files.reading(logs.steps):
            steps = [line for line in files.read_lines(logs.steps) if last is None or line["step"] <= last]
            records[:0] = [line for line in steps if line["step"] > after]
            # A program with checkpoints of its own may begin before the one that its generation started from.
            last = min([current.first_step, *(line["step"] - 1 for line in steps)])
        current = by_number.get(current.restored.generation) if current.restored else None
    return records


def _read(path: Path) -> Generation | None:
    """The generation of a folder; None if its claim was withdrawn meanwhile."""
    value = files.read_json(path / _RESTORED)
    if value is None:
        if not path.exists():
            return None
        raise ValueError(f"{path} has no {_RESTORED}: spotune did not make this folder")
    with files.reading(path / _RESTORED):
        name, number = value["checkpoint"], int(path.name)
        restored = CheckpointName.parse(name) if name else None
        if restored is not None and restored.generation >= number:  # following it would never end
            raise ValueError(f"generation {number} cannot start from a checkpoint of generation {restored.generation}")
        return Generation(number, restored)


def _to_json(generation: Generation) -> dict[str, Any]:
    return {
        "generation": generation.number,
        "checkpoint": str(generation.restored) if generation.restored else None,
        "step": generation.first_step,
        "time": time.time(),
    }
