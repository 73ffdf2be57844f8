"""What a worker tells the world: heartbeat, phase, steps and events, in the folder of its generation.

Rank 0 writes, in a thread of its own; the driver reads it and makes `status.json` and the ledger of it, so that a
worker of a superseded generation can write as much as it likes without anybody believing it. Every rank guards itself
against a hang: each beat winds up its `HangGuard`.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spotune_trainer import files
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.observability.background_writer import BackgroundWriter
from spotune_trainer.observability.stopwatch import Stopwatch
from spotune_trainer.observability.watchdog import HangGuard

logger = logging.getLogger("spotune.worker")

_WRITE_EVERY_SECONDS = 0.5
_RATE_WINDOW_STEPS = 50


class Phase(StrEnum):
    """What a run is doing, in the words of `status.json`."""

    STARTING = "Starting"
    """No driver has said anything yet, or not since the job was tried again."""
    PREPARING = "Preparing"
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    LOADING = "Loading"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    EXPORTING = "Exporting"
    DONE = "Done"
    FAILED = "Failed"


@dataclass(frozen=True)
class StepRecord:
    """One line of `steps.jsonl`; `step` is the number of optimizer steps done after it.

    Attributes:
        loss: mean per label token; None where it is not finite.
        skipped: loss or gradient was not finite, so that the step changed no weights.
        samples: hash over (id, token bytes) of the rows that went through backward, as 16 hex digits.
        tokens: label tokens that carried loss, over all ranks.
        seconds: wall time of the step on rank 0, with what came between it and the step before.
        productiveSeconds: of these, without waiting for data and checkpoints and without evaluation.
        mfu: model FLOPs utilisation, None where the device's peak is not known.
    """

    generation: int
    step: int
    epoch: float
    loss: float | None
    gradNorm: float | None  # noqa: N815 - the file's own spelling
    learningRate: float  # noqa: N815
    tokens: int
    seconds: float
    productiveSeconds: float  # noqa: N815
    worldSize: int  # noqa: N815
    samples: str
    skipped: bool
    mfu: float | None


class Journal:
    """One rank's account of its work; a context manager. Only rank 0 writes files, every rank beats."""

    def __init__(
        self,
        logs: GenerationLogs,
        rank: int,
        hang_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.logs = logs
        self.rank = rank
        self._guard = HangGuard(logs.stacks(rank), hang_timeout_seconds, clock)
        self._clock = clock
        self.spent = Stopwatch(clock)
        self._state: dict[str, Any] = {
            "startedAt": time.time(),
            "heartbeat": 0,
            "phase": Phase.LOADING.value,
            "startup": {},
        }
        self._written = self._mark = float("-inf")
        self._window: deque[tuple[float, int, int]] = deque(maxlen=_RATE_WINDOW_STEPS)
        self._writer = BackgroundWriter()

    def __enter__(self) -> Self:
        self._guard.__enter__()
        if self.rank == 0:
            self._writer.start()
        self._mark = self._clock()
        self.beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._write()
            if self.rank == 0:
                self._writer.close()
        finally:
            self._guard.__exit__(kind, error, trace)

    def beat(self) -> None:
        """Something was achieved: wind up the hang guard and, now and then, write the heartbeat."""
        self._state["heartbeat"] += 1
        self._guard.wind()
        self.publish()

    def publish(self) -> None:
        """Write what was set, now and then; nothing need have been achieved."""
        if self._clock() - self._written >= _WRITE_EVERY_SECONDS:
            self._write()

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        logger.info("%s", phase.value)
        self._state["phase"] = phase.value
        self.beat()
        self._write()

    def started(self, part: str) -> None:
        """A part of the start-up is done; its seconds count since the part before."""
        now = self._clock()
        self._state["startup"][part] = round(now - self._mark, 3)
        logger.info("%s took %.1f s", part, now - self._mark)
        self._mark = now
        self.beat()

    def set(self, **values: Any) -> None:
        """Set fields of `progress.json`."""
        self._state.update(values)

    def step(self, record: StepRecord, samples: int, total_steps: int) -> None:
        """A step is done and known to all ranks.

        Args:
            record: its line.
            samples: number of samples in it, for the rate.
            total_steps: steps of the whole run, for the time left.
        """
        self._append(self.logs.steps, record.__dict__)
        self._window.append((record.seconds, record.tokens, samples))
        seconds = sum(entry[0] for entry in self._window) or 1e-9
        rate = len(self._window) / seconds
        if record.loss is not None:
            self.set(loss=record.loss)
        self.set(
            step=record.step,
            totalSteps=total_steps,
            epoch=round(record.epoch, 4),
            gradNorm=record.gradNorm,
            learningRate=record.learningRate,
            mfu=record.mfu,
            tokensPerSecond=round(sum(entry[1] for entry in self._window) / seconds, 1),
            samplesPerSecond=round(sum(entry[2] for entry in self._window) / seconds, 1),
            etaSeconds=round((total_steps - record.step) / rate, 1),
        )

    def event(self, name: str, **values: Any) -> None:
        """Append an event for the ledger (rank 0)."""
        self._append(self.logs.events, {"time": time.time(), "event": name, **values})

    def sync(self) -> None:
        """Write what was said so far and make the steps durable, before a commit relies on them; from any thread.

        Raises:
            OSError: the volume does not take them.
        """
        if self.rank != 0:
            return
        if not self._writer.flush():
            raise OSError(errno.EAGAIN, "the log of the steps could not be written yet", str(self.logs.steps))
        if self.logs.steps.exists():
            files.fsync_file(self.logs.steps)

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        if self.rank == 0:
            self._writer.append(path, record)

    def _write(self) -> None:
        self._written = self._clock()
        if self.rank == 0:
            seconds = {part: round(value, 3) for part, value in self.spent.seconds().items()}
            state = {"time": time.time(), **deepcopy(self._state), "part": self.spent.part, "seconds": seconds}
            self._writer.replace(self.logs.progress, state)
