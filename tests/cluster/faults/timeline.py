"""The timeline of a job, computed from its artifacts on the volume. All times are seconds since the epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import list_generations
from tests.cluster.finetune_jobs import RunArtifacts

_FIRST_STEP = "firstStep"


@dataclass(frozen=True)
class TrainingInterval:
    """The time in which one worker group made steps.

    Attributes:
        generation: Its number.
        begin: When its first step began.
        steps: When each of its steps was done.
        startup: Seconds of the parts of its start, from the first line of its workers' code to its first step.
    """

    generation: int
    begin: float
    steps: dict[int, float]
    startup: dict[str, float]

    @property
    def end(self) -> float:
        """When its last step was done."""
        return max(self.steps.values())


def training_intervals(artifacts: RunArtifacts) -> list[TrainingInterval]:
    """Of every generation that made steps, in order.

    The line of a step has its duration. The progress of a generation has its start time and the durations of the parts
    of its start. Step times are sums of these.
    """
    found = []
    for generation in list_generations(artifacts.directory):
        logs = artifacts.directory.generation_logs(generation.number)
        lines, progress = list(files.read_lines(logs.steps)), files.read_json(logs.progress) or {}
        startup: dict[str, float] = progress.get("startup", {})
        if not lines or _FIRST_STEP not in startup:
            continue
        first_done = progress["startedAt"] + sum(startup.values())
        steps, now = {}, first_done - lines[0]["seconds"]
        for line in lines:
            now += line["seconds"]
            steps[line["step"]] = now
        found.append(TrainingInterval(generation.number, first_done - startup[_FIRST_STEP], steps, startup))
    return found


@dataclass(frozen=True)
class Recovery:
    """The recovery of a job after a fault.

    Attributes:
        injected_at: When the fault was injected.
        detected: When it was first recorded: as a failure, or as the end of a driver or group.
        started: When the worker group was started that made the first new step.
        first_begin: When that group's first step began.
        new_step: When the first step was done that no earlier generation had done.
        startup: Seconds of the parts of that group's start.
    """

    injected_at: float
    detected: float
    started: float
    first_begin: float
    new_step: float
    startup: dict[str, float]

    @property
    def seconds_to_detect(self) -> float:
        """From the fault to the first record of it."""
        return self.detected - self.injected_at

    @property
    def seconds_to_new_step(self) -> float:
        """From the fault to the first step that was not done before."""
        return self.new_step - self.injected_at


def longest_gap(artifacts: RunArtifacts, begin: float, end: float) -> float:
    """Seconds of the longest pause between two steps, of which a part is between two times."""
    times = [time for found in training_intervals(artifacts) for time in found.steps.values()]
    return max(
        (after - before for before, after in pairwise(times) if after > begin and before < end), default=math.inf
    )


_DETECTION_EVENTS = ("failure", "generation-ended", "attempt-ended")


def recovery(artifacts: RunArtifacts, injected_at: float) -> Recovery | None:
    """The recovery after a fault; None if no worker group was started because of it."""
    starts = [record for record in artifacts.ledger.records("generation-started") if record["time"] > injected_at]
    after = {record["generation"]: record["time"] for record in starts}
    if not after:
        return None
    intervals = training_intervals(artifacts)
    reached = max((max(found.steps) for found in intervals if found.generation not in after), default=0)
    for found in intervals:
        if found.generation in after and max(found.steps) > reached:
            new_step = min(time for step, time in found.steps.items() if step > reached)
            detected = _first_detection(artifacts.ledger.records(*_DETECTION_EVENTS), injected_at)
            started = after[found.generation]
            return Recovery(injected_at, min(detected, started), started, found.begin, new_step, found.startup)
    return None


def _first_detection(records: Sequence[dict[str, Any]], injected_at: float) -> float:
    return min((record["time"] for record in records if record["time"] > injected_at), default=math.inf)
