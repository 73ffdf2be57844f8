"""Results of schedules as JSON lines; `make chaos` goes on after the last one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.cluster.chaos.schedule import FORMAT


@dataclass(frozen=True)
class InjectedFault:
    """One fault of a schedule.

    Attributes:
        kind: what it does.
        at: when it was injected, in seconds since the start of the schedule.
        what: what it hit; empty if it found nothing to hit.
        seconds: how long it lasted; 0 if it was over at once.
        problem: why it found nothing to hit.
        job: index of the job that it was for.
    """

    kind: str
    at: float
    what: str
    seconds: float
    problem: str
    job: int


@dataclass(frozen=True)
class JobResult:
    """What became of one job.

    Attributes:
        name: its name.
        steps: optimizer steps of the model.
        generations: number of worker group starts.
        world_sizes: number of workers of the surviving steps, in order, without repetitions in a row.
        steps_lost: number of steps that were made again.
        restarts: counted restarts by cause.
        gap_seconds: longest time without a step until the job had recovered from all faults.
        recovered_seconds: from the last undone fault until steps were made again and the status showed it.
        statuses: number of statuses that were judged.
        findings: violations that the checker found.
    """

    name: str
    steps: int
    generations: int
    world_sizes: list[int]
    steps_lost: int
    restarts: dict[str, int]
    gap_seconds: float
    recovered_seconds: float
    statuses: int
    findings: list[str]


@dataclass(frozen=True)
class ServiceResult:
    """What became of the service.

    Attributes:
        requests: number of requests.
        failed: requests that ended with an error, or without their end.
        other_text: answers whose text differs from the undisturbed one.
        refused: requests that were refused at first, and answered when they were sent again.
        gap_seconds: longest time between two texts of one stream.
        recovered_seconds: from the last undone fault until it was Ready with all replicas.
        statuses: number of statuses that were judged.
        findings: violations that the checker found.
    """

    requests: int
    failed: int
    other_text: int
    refused: int
    gap_seconds: float
    recovered_seconds: float
    statuses: int
    findings: list[str]


@dataclass(frozen=True)
class ChaosRecord:
    """The result of one schedule.

    Attributes:
        seed: of the schedule.
        num_faults: its number of faults.
        faults: all faults of the schedule.
        jobs: a result for each job.
        service: the result of the service.
        problems: what could not be undone, and what did not come to its end.
        phases: seconds of each part of the run.
        commit: the tested commit.
        machine: date, machine and versions.
        format: of the schedule.
    """

    seed: int
    num_faults: int
    faults: list[InjectedFault]
    jobs: list[JobResult]
    service: ServiceResult
    problems: list[str]
    phases: dict[str, float]
    commit: str
    machine: str
    format: int = FORMAT

    @property
    def num_injected(self) -> int:
        """Number of faults that hit something."""
        return sum(not fault.problem for fault in self.faults)

    @property
    def seconds(self) -> float:
        """Duration of all parts."""
        return sum(self.phases.values())

    @property
    def findings(self) -> list[str]:
        """All violations; empty if the schedule passed."""
        return list(self._findings())

    def _findings(self) -> Iterator[str]:
        yield from self.problems
        for job in self.jobs:
            yield from (f"{job.name}: {finding}" for finding in job.findings)
        yield from (f"the service: {finding}" for finding in self.service.findings)


def append(path: Path, record: ChaosRecord) -> None:
    """Append a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path) -> list[ChaosRecord]:
    """The newest record of each schedule, by seed. Records of another format are not of these schedules."""
    lines = path.read_text().splitlines() if path.exists() else []
    values = [value for value in map(json.loads, lines) if value.get("format") == FORMAT]
    found = {(record.seed, record.num_faults, len(record.jobs)): record for record in map(_record, values)}
    return [found[key] for key in sorted(found)]


def schedules_of(records: Iterable[ChaosRecord]) -> set[tuple[int, int, int]]:
    """Seed, number of faults and number of jobs of each record."""
    return {(record.seed, record.num_faults, len(record.jobs)) for record in records}


def _record(value: dict[str, Any]) -> ChaosRecord:
    parts = {
        "faults": [InjectedFault(**fault) for fault in value["faults"]],
        "jobs": [JobResult(**job) for job in value["jobs"]],
        "service": ServiceResult(**value["service"]),
    }
    return ChaosRecord(**{**value, **parts})
