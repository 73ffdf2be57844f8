"""Reads the history of a job directory: generations, their steps, and the lineage of the model.

The trainer has its own reader, `spotune_trainer.checkpoint.generations`. The two share only the file names, so that a
fault of the trainer's reader cannot mislead the proof.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory

Record = Mapping[str, Any]
"""A line of `steps.jsonl`."""


@dataclass(frozen=True)
class Generation:
    """One start of a worker group.

    Attributes:
        restored: the checkpoint it started from; None: from the beginning.
        claimed: seconds since the epoch.
        steps: all that it logged, also those that were lost with it.
        exported: when it said that it had exported the model; None: it did not.
    """

    number: int
    restored: CheckpointName | None
    claimed: float
    steps: tuple[Record, ...]
    exported: float | None

    @property
    def first_step(self) -> int:
        """Steps that were done when it started."""
        return self.restored.step if self.restored else 0

    @property
    def made_progress(self) -> bool:
        """Whether it made steps or exported; False if it found its checkpoint corrupt."""
        return bool(self.steps) or self.exported is not None


@dataclass(frozen=True)
class Segment:
    """Surviving steps in a row that were trained at one world size.

    Attributes:
        start: the checkpoint before the first of them; None: the beginning.
    """

    world_size: int
    start: CheckpointName | None
    steps: tuple[Record, ...]

    @property
    def first_step(self) -> int:
        """Steps that were done before it."""
        return self.start.step if self.start else 0

    @property
    def losses(self) -> list[float]:
        """Of its steps."""
        return losses_of(self.steps)


def losses_of(records: Sequence[Record]) -> list[float]:
    """The losses of steps; NaN for one that was not finite."""
    return [float("nan") if record["loss"] is None else float(record["loss"]) for record in records]


def read_generations(directory: JobDirectory) -> list[Generation]:
    """All generations, oldest first."""
    folders = [path for path in directory.generations.glob("*") if path.name.isdigit()]
    return [_read(directory, folder) for folder in sorted(folders)]


def lineage(generations: Sequence[Generation]) -> list[tuple[Generation, tuple[Record, ...]]]:
    """The generations that led to the newest one's state, oldest first, each with those of its steps that count.

    Raises:
        ValueError: they lead nowhere, or in a circle.
    """
    by_number = {generation.number: generation for generation in generations}
    way: list[tuple[Generation, tuple[Record, ...]]] = []
    current, end = generations[-1] if generations else None, None
    while current is not None:
        steps = tuple(record for record in current.steps if end is None or record["step"] <= end)
        way.insert(0, (current, steps))
        if current.restored is None:
            break
        end, earlier = current.restored.step, by_number.get(current.restored.generation)
        if earlier is None or earlier.number >= current.number:
            raise ValueError(f"generation {current.number} cannot have started from {current.restored}")
        current = earlier
    return way


def surviving(generations: Sequence[Generation]) -> list[Record]:
    """The steps that led to the newest generation's state."""
    return [record for _, steps in lineage(generations) for record in steps]


def segments(generations: Sequence[Generation], *, any_size: bool = False) -> list[Segment]:
    """The surviving steps, cut where the world size changes; with `any_size` not cut, under the first world size."""
    found: list[Segment] = []
    for generation, steps in lineage(generations):
        if not steps:
            continue
        world_size = int(steps[0]["worldSize"])
        if found and (any_size or found[-1].world_size == world_size):
            found[-1] = replace(found[-1], steps=found[-1].steps + steps)
        else:
            found.append(Segment(world_size, generation.restored, steps))
    return found


def steps_lost(generations: Sequence[Generation]) -> int:
    """Steps that were trained and do not count."""
    return sum(len(generation.steps) for generation in generations) - len(surviving(generations))


def committed(directory: JobDirectory) -> list[CheckpointName]:
    """The checkpoints that are there with a manifest, oldest step first."""
    return sorted(CheckpointName.parse(path.parent.name) for path in directory.checkpoints.glob("*/manifest.json"))


def _read(directory: JobDirectory, folder: Path) -> Generation:
    claim = json.loads((folder / "restored.json").read_text())
    number, name = int(folder.name), claim["checkpoint"]
    logs = directory.root / "logs" / f"gen-{number}"
    exported = [line["time"] for line in _lines(logs / "events.jsonl") if line["event"] == "exported"]
    return Generation(
        number=number,
        restored=CheckpointName.parse(name) if name else None,
        claimed=float(claim["time"]),
        steps=tuple(_lines(logs / "steps.jsonl")),
        exported=max(exported, default=None),
    )


def _lines(path: Path) -> Iterator[Record]:
    """Whole lines. A kill may have cut off the last one, and a full volume any; then the next line is the whole one."""
    if path.exists():
        lines = path.read_bytes().split(b"\n")
        for line, following in itertools.pairwise(lines):
            if len(line) >= len(following) or not following.startswith(line):
                yield json.loads(line)


def epoch_hashes(generations: Sequence[Generation], steps_per_epoch: int) -> dict[int, int]:
    """Hash over the rows of each epoch's surviving steps, which counts each row as often as it was trained on."""
    by_epoch: dict[int, int] = {}
    for record in surviving(generations):
        epoch = (record["step"] - 1) // steps_per_epoch + 1
        by_epoch[epoch] = (by_epoch.get(epoch, 0) + int(record["samples"], 16)) % (1 << 64)
    return by_epoch
