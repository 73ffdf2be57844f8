"""What was fuzzed for how long: one JSON line for each turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One turn of a parser.

    Attributes:
        target: its name.
        commit: of the checkout.
        seconds: how long it was fuzzed.
        inputs: that it read.
        failures: whether one of them failed: 0 or 1, since a turn ends with the first failure.
        day: such as 2026-11-27.
    """

    target: str
    commit: str
    seconds: float
    inputs: int
    failures: int
    day: str


def read_records(path: Path) -> list[Record]:
    """The records in a file, in order; none if it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Record(**json.loads(line)) for line in lines]


def append_record(path: Path, record: Record) -> None:
    """Append a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(record)) + "\n")


def seconds_of(records: Sequence[Record], target: str) -> float:
    """How long a parser was fuzzed, over all turns."""
    return sum(record.seconds for record in records if record.target == target)
