"""What a run has measured of itself, read from its ledger and the files of the running generation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spotune.goodput import Part
from spotune.resize.times import MeasuredTimes
from spotune_trainer import files
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.job_directory.ledger import Ledger

_MIN_STEPS = 5
"""Steps that a group has to make before their duration counts as measured."""
_ONCE = ("reference", "evaluation")
"""Parts of a group's start-up that the next group does not have."""
_STEP_PARTS = (Part.PRODUCTIVE, Part.DATA_WAIT)

Record = Mapping[str, Any]


def measured_times(ledger: Ledger, logs: GenerationLogs, generation: int) -> MeasuredTimes | str:
    """The measured times of a run; what is missing, if something is.

    The next group is expected to start as fast as the running one did. If that one restored no checkpoint, reading one
    counts as long as an earlier restore took or, without any, as long as a commit.

    Args:
        ledger: of the job.
        logs: folder of the running generation.
        generation: its number.
    """
    started = next(record for record in ledger.records("generation-started") if record["generation"] == generation)
    commits = ledger.records("committed")
    progress = files.read_json(logs.progress) or {}
    steps = progress.get("step", 0) - started["step"]
    if steps < _MIN_STEPS:
        return f"the workers have made fewer than {_MIN_STEPS} steps since their start"
    if not commits:
        return "there was no commit yet"
    ended = ledger.records("generation-ended")
    seconds = dict(_step_seconds(ended))
    running = sum(progress["seconds"].get(part, 0.0) for part in _STEP_PARTS) / steps
    if running <= 0:
        return "the duration of a step is not known"
    commit = commits[-1]
    change = {
        "plan": float(started.get("planSeconds", 0.0)),
        "workers": max(0.0, progress["startedAt"] - started["time"]),
        "restore": _restore_seconds(ended, float(commit["seconds"])),
        **{part: float(value) for part, value in progress["startup"].items() if part not in _ONCE},
    }
    return MeasuredTimes(
        {**seconds, started["worldSize"]: running},
        float(commit["seconds"]),
        float(commit.get("stallSeconds", 0.0)),
        change,
    )


def steps_left(logs: GenerationLogs) -> float:
    """Number of steps until the last one of the job; infinite if it is not known yet."""
    progress = files.read_json(logs.progress) or {}
    total = progress.get("totalSteps")
    return math.inf if total is None else max(0, total - progress["step"])


def lost_early_share(ledger: Ledger) -> float:
    """Share of notices with a deadline before which the node was lost. One more notice counts as kept."""
    # A group may get several.
    notices = {record["generation"] for record in ledger.records("leaving") if record["seconds"] is not None}
    lost = sum(bool(record.get("beforeDeadline")) for record in ledger.records("failure"))
    return lost / (len(notices) + 1)


def _step_seconds(ended: Iterable[Record]) -> Iterator[tuple[int, float]]:
    """Mean seconds of a step by number of workers, over the generations that have ended."""
    steps: dict[int, int] = defaultdict(int)
    seconds: dict[int, float] = defaultdict(float)
    for record in ended:
        steps[record["worldSize"]] += record["steps"]
        seconds[record["worldSize"]] += sum(record.get("parts", {}).get(part, 0.0) for part in _STEP_PARTS)
    for workers, count in steps.items():
        if count >= _MIN_STEPS and seconds[workers] > 0:
            yield workers, seconds[workers] / count


def _restore_seconds(ended: Iterable[Record], otherwise: float) -> float:
    """Seconds of the last restore of a checkpoint."""
    restores = [float(record.get("parts", {}).get(Part.RESTORE, 0.0)) for record in ended]
    return next((seconds for seconds in reversed(restores) if seconds > 0), otherwise)
