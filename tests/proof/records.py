"""Results of schedules and controls as JSON lines; `make proof` resumes after the last one.

The field names are the keys of the file.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_CODE = ("api", "trainer", "tests/proof", "tests/trainer/support", "constraints")
_lock = threading.Lock()


@dataclass(frozen=True)
class FaultRecord:
    """One injected fault.

    Attributes:
        deed: the kind of fault.
        moment: its injection point.
        step: the last step logged before it.
        hit: whether the run was still at the injection point right after the fault.
        world_size: desired workers from then on.
    """

    deed: str
    moment: str
    step: int
    hit: bool
    world_size: int


@dataclass(frozen=True)
class ScheduleRecord:
    """The result of one schedule.

    Attributes:
        world_sizes: world sizes of the surviving steps, in order.
        wanted: number of faults in the schedule.
        blows: the faults that were injected.
        generations: number of worker group starts.
        steps_lost: number of steps that were repeated.
        next_loss: largest relative difference of a loss after a change of world size; None without a change.
        curve: largest relative difference of any loss from the undisturbed run.
        findings: violations that the checker found; empty if the schedule is proven.
        seconds: duration of the run and its reference runs.
        commit: the tested commit.
    """

    seed: int
    zero_stage: int
    world_sizes: list[int]
    wanted: int
    blows: list[FaultRecord]
    generations: int
    steps_lost: int
    next_loss: float | None
    curve: float | None
    findings: list[str]
    seconds: float
    commit: str


@dataclass(frozen=True)
class ControlRecord:
    """The result of one negative control.

    Attributes:
        live: whether the whole product ran, with kills.
        caught: the expected finding; None if the checker missed it.
    """

    control: str
    live: bool
    caught: str | None
    findings: list[str]
    seconds: float
    commit: str


Record = ScheduleRecord | ControlRecord
_KINDS: dict[str, type[Record]] = {"Proven": ScheduleRecord, "Controlled": ControlRecord}
"""Record types by the name that a JSON line gives as its `kind`."""


def append(path: Path, record: Record) -> None:
    """Append a record. Thread-safe."""
    with _lock, path.open("a") as file:
        file.write(json.dumps({"kind": _kind(record), **asdict(record)}) + "\n")


def read(path: Path) -> list[Record]:
    """Return all records; a later record of the same subject replaces an earlier one."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [_record(json.loads(line)) for line in lines]
    return list({_subject(record): record for record in found}.values())


def drop_outdated(path: Path, without: Container[int] = ()) -> list[Record]:
    """Drop records of another version of the code and of the given seeds; returns the others."""
    found = [record for record in read(path) if _is_current(record.commit)]
    kept = [record for record in found if not (isinstance(record, ScheduleRecord) and record.seed in without)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for record in kept:
        append(path, record)
    return kept


def seeds_of(records: Iterable[Record]) -> set[int]:
    """Seeds of all schedule records."""
    return {record.seed for record in records if isinstance(record, ScheduleRecord)}


def controls_of(records: Iterable[Record]) -> set[tuple[str, bool]]:
    """Name and `live` of all control records."""
    return {(record.control, record.live) for record in records if isinstance(record, ControlRecord)}


def _subject(record: Record) -> tuple[object, ...]:
    return (record.seed,) if isinstance(record, ScheduleRecord) else (record.control, record.live)


def _kind(record: Record) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(record, kind))


def _record(value: dict[str, Any]) -> Record:
    if _KINDS[value.pop("kind")] is ControlRecord:
        return ControlRecord(**value)
    return ScheduleRecord(**{**value, "blows": [FaultRecord(**blow) for blow in value["blows"]]})


def _is_current(commit: str) -> bool:
    """Whether the tested code is unchanged since a commit; False for records with uncommitted changes."""
    name = commit.strip("`")
    changed = ["git", "diff", "--quiet", name, "--", *_CODE]
    return name.isalnum() and subprocess.run(changed, capture_output=True).returncode == 0
