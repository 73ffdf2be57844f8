"""What became of each schedule and each control, as JSON lines: `make proof` goes on after the last of them."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_CODE = ("api", "trainer", "tests/proof", "tests/trainer", "constraints")
_lock = threading.Lock()


@dataclass(frozen=True)
class Blow:
    """One disturbance as it came.

    Attributes:
        step: the last that was logged before it.
        hit: whether its moment was still on right after it.
        world_size: workers that were asked for from then on.
    """

    deed: str
    moment: str
    step: int
    hit: bool
    world_size: int


@dataclass(frozen=True)
class Proven:
    """What became of one schedule.

    Attributes:
        world_sizes: of the surviving steps, from the first to the last.
        wanted: number of disturbances of the schedule.
        blows: those that came.
        generations: starts of a worker group.
        steps_lost: that were made again.
        next_loss: largest relative difference of a loss in the steps after a change of world size; None: no change.
        curve: largest relative difference of any loss from the undisturbed run.
        findings: what the oracle says; nothing where the promise was kept.
        seconds: of the run and of what it was compared with.
        commit: of the code that was tried.
    """

    seed: int
    zero_stage: int
    world_sizes: list[int]
    wanted: int
    blows: list[Blow]
    generations: int
    steps_lost: int
    next_loss: float | None
    curve: float | None
    findings: list[str]
    seconds: float
    commit: str


@dataclass(frozen=True)
class Controlled:
    """What the oracle says of one thing that was broken.

    Attributes:
        live: whether the whole product ran, with kills.
        caught: the finding that it was to be caught by; None: it was not.
    """

    control: str
    live: bool
    caught: str | None
    findings: list[str]
    seconds: float
    commit: str


Record = Proven | Controlled


def append(path: Path, record: Record) -> None:
    """Add a record; from any thread."""
    with _lock, path.open("a") as file:
        file.write(json.dumps({"kind": type(record).__name__, **asdict(record)}) + "\n")


def read(path: Path) -> list[Record]:
    """All records; of two of the same thing the later one."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [_record(json.loads(line)) for line in lines]
    return list({_subject(record): record for record in found}.values())


def keep_those_of_this_code(path: Path, without: Container[int] = ()) -> list[Record]:
    """Drop records of other code than the checkout's, and those of some seeds; returns the others."""
    found = [record for record in read(path) if _is_of_this_code(record.commit)]
    kept = [record for record in found if not (isinstance(record, Proven) and record.seed in without)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for record in kept:
        append(path, record)
    return kept


def seeds_of(records: Iterable[Record]) -> set[int]:
    """The seeds that there are records of."""
    return {record.seed for record in records if isinstance(record, Proven)}


def controls_of(records: Iterable[Record]) -> set[tuple[str, bool]]:
    """Names of the controls that there are records of, each with whether it was live."""
    return {(record.control, record.live) for record in records if isinstance(record, Controlled)}


def _subject(record: Record) -> tuple[object, ...]:
    return (record.seed,) if isinstance(record, Proven) else (record.control, record.live)


def _record(value: dict[str, Any]) -> Record:
    kind = value.pop("kind")
    if kind == Controlled.__name__:
        return Controlled(**value)
    return Proven(**{**value, "blows": [Blow(**blow) for blow in value["blows"]]})


def _is_of_this_code(commit: str) -> bool:
    """Whether nothing that matters has changed since a commit; nobody knows of changes that were not committed."""
    name = commit.strip("`")
    changed = ["git", "diff", "--quiet", name, "--", *_CODE]
    return name.isalnum() and subprocess.run(changed, capture_output=True).returncode == 0
