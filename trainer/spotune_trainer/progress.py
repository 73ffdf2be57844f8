"""What a worker tells the world: heartbeat, phase, steps and events, in the folder of its generation.

Rank 0 writes; the driver reads it and makes `status.json` and the ledger of it, so that a worker of a superseded
generation can write as much as it likes without anybody believing it. Every rank guards itself against a hang: each
beat winds up a timer of the interpreter's C code, which needs no lock of Python, dumps the stacks of all threads and
ends the process.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spotune_trainer import files
from spotune_trainer.layout import GenerationLogs
from spotune_trainer.stopwatch import Stopwatch

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
        self._hang_timeout_seconds = hang_timeout_seconds
        self._clock = clock
        self.spent = Stopwatch(clock)
        self._state: dict[str, Any] = {
            "startedAt": time.time(),
            "heartbeat": 0,
            "phase": Phase.LOADING.value,
            "startup": {},
        }
        self._wound = self._written = self._mark = float("-inf")
        self._window: deque[tuple[float, int, int]] = deque(maxlen=_RATE_WINDOW_STEPS)
        self._unwritten: deque[tuple[Path, dict[str, Any]]] = deque()

    def __enter__(self) -> Self:
        self.logs.root.mkdir(parents=True, exist_ok=True)
        self._stacks = self.logs.stacks(self.rank).open("w", encoding="utf-8")
        self._mark = self._clock()
        self.beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._write()
        self._stacks.close()

    def beat(self) -> None:
        """Something was achieved: wind up the hang guard and, now and then, write the heartbeat."""
        now = self._clock()
        self._state["heartbeat"] += 1
        if now - self._wound >= min(1.0, self._hang_timeout_seconds / 4):
            faulthandler.dump_traceback_later(self._hang_timeout_seconds, exit=True, file=self._stacks)
            self._wound = now
        if now - self._written >= _WRITE_EVERY_SECONDS:
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
        """Make the steps durable, before a commit that relies on them (rank 0); from any thread.

        Raises:
            OSError: the volume does not take them.
        """
        if self._unwritten:
            raise OSError(errno.EAGAIN, "the log of the steps could not be written yet", str(self.logs.steps))
        if self.rank == 0 and self.logs.steps.exists():
            descriptor = os.open(self.logs.steps, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        if self.rank == 0:
            self._unwritten.append((path, record))
            self._write_lines()

    def _write_lines(self) -> None:
        """Write what is to be appended; a volume that does not take it now is asked again with the next line."""
        while self._unwritten:
            path, record = self._unwritten[0]
            try:
                files.append_json(path, record)
            except OSError as error:
                logger.warning("%s cannot be written, and will be: %s", path.name, error)
                return
            self._unwritten.popleft()

    def _write(self) -> None:
        self._written = self._clock()
        if self.rank == 0:
            self._write_lines()
            with suppress(OSError):  # a volume that is full now may be grown: the next one says it all
                seconds = {part: round(value, 3) for part, value in self.spent.seconds().items()}
                state = {"time": time.time(), **self._state, "part": self.spent.part, "seconds": seconds}
                files.write_json(self.logs.progress, state, durable=False)
