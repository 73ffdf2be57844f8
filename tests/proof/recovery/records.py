"""Results of recovery schedules and their controls as JSON lines, one of each seed; a later record replaces an earlier.

The field names are the keys of the file.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.proof.records import ControlRecord

_lock = threading.Lock()


@dataclass(frozen=True)
class KillRecord:
    """One kill.

    Attributes:
        target: what was killed.
        moment: when.
        step: the last step before it.
        hit: whether the run was at that moment right before the kill.
    """

    target: str
    moment: str
    step: int
    hit: bool


@dataclass(frozen=True)
class RestoreRecord:
    """Where a worker group read its state from, in bytes of all ranks."""

    generation: int
    memory: int
    peer: int
    volume: int


@dataclass(frozen=True)
class RecoveryRecord:
    """The result of one schedule.

    Attributes:
        theme: what the schedule had to contain.
        nodes: slots of each node.
        memory_copies: `checkpoint.memoryCopies`.
        resizes: whether the world size changed with the nodes, with the same bits at any.
        world_sizes: of the groups that made steps, without repetitions in a row.
        planned: number of kills in the schedule.
        kills: those that were injected.
        restores: of the groups that restored a checkpoint.
        generations: number of worker group starts.
        steps_lost: number of steps that were repeated.
        export_sha256: of the exported weights.
        findings: violations; empty if the schedule is proven.
        seconds: duration of the run and its reference runs.
        commit: the tested commit.
        machine: day and machine.
    """

    seed: int
    theme: str
    nodes: list[int]
    zero_stage: int
    memory_copies: int
    resizes: bool
    gpus: bool
    world_sizes: list[int]
    planned: int
    kills: list[KillRecord]
    restores: list[RestoreRecord]
    generations: int
    steps_lost: int
    export_sha256: str | None
    findings: list[str]
    seconds: float
    commit: str
    machine: str


@dataclass(frozen=True)
class RecoveryControlRecord(ControlRecord):
    """The result of one negative control, with the day and the machine."""

    machine: str


@dataclass(frozen=True)
class Records:
    """All records of a file."""

    schedules: Sequence[RecoveryRecord] = field(default=())
    controls: Sequence[RecoveryControlRecord] = field(default=())


def append(path: Path, record: RecoveryRecord | RecoveryControlRecord) -> None:
    """Append a record. Thread-safe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock, path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path) -> Records:
    """Return all records, in the order of their seeds and names."""
    values = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [RecoveryControlRecord(**value) for value in values if "control" in value]
    controls = {(record.live, record.control): record for record in found}
    schedules = {value["seed"]: _schedule(value) for value in values if "seed" in value}
    return Records([schedules[seed] for seed in sorted(schedules)], [controls[key] for key in sorted(controls)])


def _schedule(value: dict[str, Any]) -> RecoveryRecord:
    kills = [KillRecord(**kill) for kill in value["kills"]]
    restores = [RestoreRecord(**restore) for restore in value["restores"]]
    return RecoveryRecord(**{**value, "kills": kills, "restores": restores})
