"""Reads the timings of a real run from its ledger, for use in simulations."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from spotune.errors import UsageError
from spotune.goodput import Part
from spotune.simulate.terms import Timings

Record = Mapping[str, Any]
LEDGER: Final = "ledger.jsonl"
"""Name of the ledger in a job's directory."""


def read_timings(directory: Path, base: Timings, option: str = "--measured") -> Timings:
    """The timings measured in a run; unmeasured ones are taken from ``base``.

    Args:
        directory: The job's directory, from `spotune run --directory` or from the volume.
        base: Timings for events that did not occur in the run, such as the loss of a head.
        option: The option that names the directory, for messages.

    Raises:
        UsageError: There is no ledger, it was edited, or it contains no ended worker group with at least one step.
    """
    records = read_records(directory, option)
    with interpreting(directory / LEDGER):
        measured = timings_from_ledger(records, base)
    if not measured.step:
        raise UsageError(
            f"{option} {directory}: no worker group of this run has completed a step and ended yet. Wait for one, or "
            "set --step-seconds and the other times instead."
        )
    return measured


def read_records(directory: Path, option: str) -> list[Record]:
    """The records of the ledger in a job's directory, without incomplete lines.

    Args:
        directory: The job's directory.
        option: The option that names it, for messages.

    Raises:
        UsageError: There is no ledger, or it is no text.
    """
    file = directory / LEDGER
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{option} {directory}: cannot read the run's ledger: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: is not a ledger: {error}.") from error
    return [record for line in lines if (record := _parse_record(line)) is not None]


@contextmanager
def interpreting(file: Path) -> Iterator[None]:
    """Turn what wrong content of a run's file raises into a UsageError that names the file."""
    try:
        yield
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UsageError(
            f"{file}: was edited, or written by another version of spotune: {type(error).__name__}: {error}."
        ) from error


def _parse_record(line: str) -> Record | None:
    """A line of the ledger; None for an incomplete line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def timings_from_ledger(records: Sequence[Record], base: Timings) -> Timings:
    """Timings from a ledger's events: means for frequent events, medians for rare ones."""
    started = {record["generation"]: record for record in records if record["event"] == "generation-started"}
    ended = [record for record in records if record["event"] == "generation-ended" and "parts" in record]
    trained = [record for record in ended if record["steps"]]
    commits = [record for record in records if record["event"] == "committed"]
    failed = [record for record in trained if _part(record, Part.LOST)]
    first = set(_first_generations(records))
    start_ups = [
        (record["generation"] in first, _part(record, Part.STARTUP) + started[record["generation"]]["planSeconds"])
        for record in trained
    ]
    earlier = [seconds for is_first, seconds in start_ups if is_first]
    later = [seconds for is_first, seconds in start_ups if not is_first]
    restored = [record for record in trained if started[record["generation"]].get("restoredFrom")]
    steps = sum(record["steps"] for record in trained)
    return replace(
        base,
        step=_step_seconds(trained) or base.step,
        data_wait=_sum(trained, Part.DATA_WAIT) / steps if steps else base.data_wait,
        start_up=_median(later or earlier, base.start_up),
        first_start_up=_median(earlier, base.start_up) if later and earlier else base.first_start_up,
        restore=_median([_part(record, Part.RESTORE) for record in restored], base.restore),
        stall=_mean([record["stallSeconds"] for record in commits], base.stall),
        commit=_median([record["seconds"] for record in commits], base.commit),
        detection=_median([_detection_seconds(record) for record in failed], base.detection),
        attempt=_median(list(_attempt_seconds(records)), base.attempt),
        # A new node imports what those of the first group imported.
        join=_median([record["startSeconds"] for record in records if "startSeconds" in record] or earlier, base.join),
        head_loss=_median(list(_head_loss_seconds(records)), base.head_loss),
    )


def _step_seconds(trained: Iterable[Record]) -> dict[int, float]:
    """Mean productive seconds per step by number of workers, including steps that were rolled back later."""
    seconds: dict[int, float] = defaultdict(float)
    steps: dict[int, int] = defaultdict(int)
    for record in trained:
        seconds[record["worldSize"]] += _part(record, Part.PRODUCTIVE)
        steps[record["worldSize"]] += record["steps"]
    return {workers: seconds[workers] / steps[workers] for workers in sorted(steps)}


def _detection_seconds(record: Record) -> float:
    """Seconds from a loss to the end of the group: the lost time minus half a step, its expected unfinished part."""
    step = _part(record, Part.PRODUCTIVE) / int(record["steps"])
    return max(0.0, _part(record, Part.LOST) - step / 2)


def _first_generations(records: Iterable[Record]) -> Iterable[int]:
    """The first generation of each driver."""
    is_first = True
    for record in records:
        if record["event"] == "attempt-started":
            is_first = True
        elif record["event"] == "generation-started":
            if is_first:
                yield record["generation"]
            is_first = False


def _attempt_seconds(records: Sequence[Record]) -> Iterable[float]:
    """Seconds from a driver's start until it starts workers or waits for some, without planning."""
    events = [record for record in records if record["event"] in ("attempt-started", "waiting", "generation-started")]
    for before, after in pairwise(events):
        if before["event"] == "attempt-started" and after["event"] != "attempt-started":
            yield max(0.0, after["time"] - before["time"] - after.get("planSeconds", 0.0))


def _head_loss_seconds(records: Sequence[Record]) -> Iterable[float]:
    """Seconds from the last heartbeat of a lost driver to the start of the next one."""
    events = [record for record in records if record["event"] in ("attempt-started", "attempt-ended")]
    for before, after in pairwise(events):
        if before["event"] == "attempt-ended" and before["exitCode"] is None and after["event"] == "attempt-started":
            yield max(0.0, after["time"] - before.get("lastSeen", before["time"]))


def _part(record: Record, part: Part) -> float:
    return float(record["parts"].get(part, 0.0))


def _sum(records: Iterable[Record], part: Part) -> float:
    return sum(_part(record, part) for record in records)


def _mean(values: Sequence[float], otherwise: float) -> float:
    return fmean(values) if values else otherwise


def _median(values: Sequence[float], otherwise: float) -> float:
    return float(median(values)) if values else otherwise
