"""When what happened to a job, from what it has left on the volume. All times are seconds since the epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import list_generations
from tests.cluster.finetune_jobs import Remains

_FIRST_STEP = "firstStep"


@dataclass(frozen=True)
class Stretch:
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


def stretches(remains: Remains) -> list[Stretch]:
    """Of every generation that made steps, in order.

    A step's line says how long it took, and a generation's progress when it began and how long the parts of its start
    took: step times add up from there.
    """
    found = []
    for generation in list_generations(remains.directory):
        logs = remains.directory.generation_logs(generation.number)
        lines, progress = list(files.read_lines(logs.steps)), files.read_json(logs.progress) or {}
        startup: dict[str, float] = progress.get("startup", {})
        if not lines or _FIRST_STEP not in startup:
            continue
        first_done = progress["startedAt"] + sum(startup.values())
        steps, now = {}, first_done - lines[0]["seconds"]
        for line in lines:
            now += line["seconds"]
            steps[line["step"]] = now
        found.append(Stretch(generation.number, first_done - startup[_FIRST_STEP], steps, startup))
    return found


@dataclass(frozen=True)
class Recovery:
    """How a job went on after a fault at `struck`.

    Attributes:
        struck: When the fault was brought about.
        detected: When somebody of the job acted on it first: recorded a failure, or the end of a driver or group.
        started: When the worker group was started that made the first new step.
        first_begin: When that group's first step began.
        new_step: When the first step was done that no generation before had done.
        startup: Seconds of the parts of that group's start.
    """

    struck: float
    detected: float
    started: float
    first_begin: float
    new_step: float
    startup: dict[str, float]

    @property
    def seconds_to_detect(self) -> float:
        """From the fault to the first record of it."""
        return self.detected - self.struck

    @property
    def seconds_to_new_step(self) -> float:
        """From the fault to the first step that had not been done before."""
        return self.new_step - self.struck


_SIGNS = ("failure", "generation-ended", "attempt-ended")


def recovery(remains: Remains, struck: float) -> Recovery | None:
    """How training went on after a fault; None where no worker group was started because of it."""
    starts = [record for record in remains.ledger.records("generation-started") if record["time"] > struck]
    after = {record["generation"]: record["time"] for record in starts}
    if not after:
        return None
    all_stretches = stretches(remains)
    reached = max((max(found.steps) for found in all_stretches if found.generation not in after), default=0)
    for found in all_stretches:
        if found.generation in after and max(found.steps) > reached:
            new_step = min(time for step, time in found.steps.items() if step > reached)
            detected = _first_sign(remains.ledger.records(*_SIGNS), struck)
            started = after[found.generation]
            return Recovery(struck, min(detected, started), started, found.begin, new_step, found.startup)
    return None


def _first_sign(records: Sequence[dict[str, Any]], struck: float) -> float:
    return min((record["time"] for record in records if record["time"] > struck), default=math.inf)
