"""What a report tells, gathered from the files of a job's folder; the folder may be of a job that still runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune.errors import UsageError
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger


@dataclass(frozen=True)
class Stretch:
    """One worker group, from its start to its end.

    Attributes:
        generation: Its number.
        start: Unix time.
        end: Unix time; None while it runs.
        world_size: Its workers.
        first_step: That it began from.
        steps: That it made.
        ending: Why it ended: the cause of a failure, `left`, `done`, or empty while it runs or nobody knows.
        message: What was said about it.
    """

    generation: int
    start: float
    end: float | None
    world_size: int
    first_step: int
    steps: int
    ending: str
    message: str

    def seconds(self, now: float) -> float:
        """How long it ran, or has run until `now` (Unix time)."""
        return (self.end or now) - self.start

    @property
    def why(self) -> str:
        """Why it ended, in words; that it runs where nothing else is known."""
        if not self.ending:
            return "" if self.end else "runs"
        return f"{self.ending}: {self.message}" if self.message else self.ending


@dataclass(frozen=True)
class Story:
    """A job so far.

    Attributes:
        name: Of the job.
        job: As it was written, in JSON.
        told: Unix time of the newest thing that is known.
        status: `status.json`.
        plan: `plan.json`.
        result: `result.json`; empty while the job is not trained.
        steps: Records of the steps that led to the model, in order, each once.
        stretches: Worker groups in order.
        commits: Events `committed` in order.
        evaluations: Events `evaluated` in order.
    """

    name: str
    job: Mapping[str, Any]
    told: float
    status: Mapping[str, Any]
    plan: Mapping[str, Any]
    result: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    stretches: Sequence[Stretch]
    commits: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]


def read_story(root: Path) -> Story:
    """The story of the job in a folder.

    Raises:
        UsageError: There is no job in it.
    """
    directory = JobDirectory(root)
    job = files.read_json(directory.job)
    if job is None:
        raise UsageError(f"{root} is not the directory of a job: there is no job.json in it")
    ledger = Ledger(directory)
    records = ledger.records()
    status = files.read_json(directory.status) or {}
    steps = surviving_steps(directory) if directory.generations.exists() else []
    told = max([status.get("time", 0.0), *(record["time"] for record in records)], default=time.time())
    return Story(
        name=job["metadata"]["name"],
        job=job,
        told=told,
        status=status,
        plan=files.read_json(directory.plan) or {},
        result=files.read_json(directory.result) or {},
        steps=steps,
        stretches=_stretches(records),
        commits=[record for record in records if record["event"] == "committed"],
        evaluations=[record for record in records if record["event"] == "evaluated"],
    )


def _stretches(records: Sequence[Mapping[str, Any]]) -> list[Stretch]:
    ends: dict[int, Mapping[str, Any]] = {}
    endings: dict[int, tuple[str, str]] = {}
    for record in records:
        number = record.get("generation")
        if number is None:
            continue
        if record["event"] == "generation-ended":
            ends[number] = record
        elif record["event"] == "failure":
            endings[number] = (record["cause"], record["message"])
        elif record["event"] in ("left", "exported"):
            endings[number] = ("left", "for another number of workers") if record["event"] == "left" else ("done", "")
    return [_stretch(record, ends, endings) for record in records if record["event"] == "generation-started"]


def _stretch(
    started: Mapping[str, Any], ends: Mapping[int, Mapping[str, Any]], endings: Mapping[int, tuple[str, str]]
) -> Stretch:
    number = started["generation"]
    ended = ends.get(number, {})
    ending, message = endings.get(number, ("", ""))
    # A generation that went down with its driver is recorded by the next one: its own seconds tell when it ended.
    end = started["time"] + ended["seconds"] if ended else None
    steps = ended.get("steps", 0)
    return Stretch(number, started["time"], end, started["worldSize"], started["step"], steps, ending, message)
