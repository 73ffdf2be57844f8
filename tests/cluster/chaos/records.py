"""Results of schedules as JSON lines; `make chaos` goes on after the last one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class InjectedFault:
    """One fault of a schedule.

    Attributes:
        kind: what it does.
        at: when it was injected, in seconds since the start of the schedule.
        what: what it hit; empty if it found nothing to hit.
        seconds: how long it lasted; 0 if it was over at once.
        problem: why it found nothing to hit.
    """

    kind: str
    at: float
    what: str
    seconds: float
    problem: str


@dataclass(frozen=True)
class ChaosRecord:
    """The result of one schedule.

    Attributes:
        faults: all faults of the schedule.
        num_faults: their number.
        steps: optimizer steps of the model.
        generations: number of worker group starts.
        world_sizes: number of workers of the surviving steps, in order, without repetitions in a row.
        steps_lost: number of steps that were made again.
        restarts: counted restarts by cause.
        gap_seconds: longest time without a step while the faults were injected.
        recovered_seconds: from the last undone fault until steps were made again and the status showed it.
        statuses: number of statuses that were judged.
        findings: violations that the checker found; empty if the schedule passed.
        seconds: duration, with that of the undisturbed run.
        commit: the tested commit.
        machine: date, machine and versions.
    """

    seed: int
    num_faults: int
    faults: list[InjectedFault]
    steps: int
    generations: int
    world_sizes: list[int]
    steps_lost: int
    restarts: dict[str, int]
    gap_seconds: float
    recovered_seconds: float
    statuses: int
    findings: list[str]
    seconds: float
    commit: str
    machine: str

    @property
    def num_injected(self) -> int:
        """Number of faults that hit something."""
        return sum(not fault.problem for fault in self.faults)


def append(path: Path, record: ChaosRecord) -> None:
    """Append a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path) -> list[ChaosRecord]:
    """The newest record of each schedule, by seed."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {(record.seed, record.num_faults): record for record in map(_record, lines)}
    return [found[key] for key in sorted(found)]


def schedules_of(records: Iterable[ChaosRecord]) -> set[tuple[int, int]]:
    """Seed and number of faults of each record."""
    return {(record.seed, record.num_faults) for record in records}


def _record(line: str) -> ChaosRecord:
    value = json.loads(line)
    return ChaosRecord(**{**value, "faults": [InjectedFault(**fault) for fault in value["faults"]]})
