"""The driver's view of a generation: its workers' files become `status.json`, ledger events and curves.

A thread of the driver, and the only writer of `status.json`. The heartbeat it publishes grows only when the driver or
the workers did something: a thread that merely runs proves nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from spotune_trainer import files
from spotune_trainer.files import LineReader
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.goodput_ledger import GoodputAccount
from spotune_trainer.observability.progress import Phase
from spotune_trainer.observability.tracking.tracker import Tracker

_LOOK_EVERY_SECONDS = 0.5
_KEPT = ("step", "totalSteps", "loss", "evalLoss", "evalScores", "lastCheckpoint")
_NO_STATUS: dict[str, Any] = dict.fromkeys(
    (
        "step",
        "totalSteps",
        "epoch",
        "loss",
        "learningRate",
        "gradNorm",
        "skippedSteps",
        "evalLoss",
        "evalScores",
        "tokensPerSecond",
        "samplesPerSecond",
        "mfu",
        "etaSeconds",
        "lastCheckpoint",
        "checkpointProblem",
        "resumedFromStep",
        "message",
    )
)


class Monitor:
    """Publishes where the run stands; a context manager around the driver's work."""

    def __init__(self, directory: JobDirectory, ledger: Ledger, attempt: int, trackers: Sequence[Tracker]) -> None:
        self._directory = directory
        self._ledger = ledger
        self._trackers = trackers
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        earlier = files.read_json(directory.status) or {}
        self._beats = int(earlier.get("heartbeat", 0)) + 1
        self._began = time.time()
        self._status: dict[str, Any] = {
            **_NO_STATUS,
            **{name: earlier.get(name) for name in _KEPT},
            "phase": Phase.PREPARING.value,
            "generation": int(earlier.get("generation", 0)),
            "attempt": attempt,
            "workers": {"running": 0, "wanted": 0},
            "restarts": ledger.restarts(),
            "stepsLost": ledger.steps_lost(),
            "startup": {},
        }
        self._generation: _GenerationFiles | None = None
        self._account = GoodputAccount(directory)
        self._heard = (self._beats, time.time())

    def __enter__(self) -> Monitor:
        self._publish()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.look()
        for tracker in self._trackers:
            tracker.close(Phase(self._status["phase"]))

    def update(self, phase: Phase | None = None, **values: Any) -> None:
        """The driver did something: a new phase or new fields, published at once."""
        with self._lock:
            self._beats += 1
            self._status.update(values)
            if phase is not None:
                self._status["phase"] = phase.value
            self._publish()

    def startup(self, part: str, seconds: float) -> None:
        """How long a part of the start-up took on the driver's side."""
        with self._lock:
            self._status["startup"] = {**self._status["startup"], part: round(seconds, 3)}

    def begin(self, generation: int, first_step: int, workers: int) -> None:
        """A worker group starts after `first_step`."""
        with self._lock:
            for tracker in self._trackers:
                tracker.rewind(first_step)
            self._generation = _GenerationFiles(self._directory.generation_logs(generation))
            self._began = time.time()
            self._status.update(generation=generation, step=first_step, resumedFromStep=first_step or None)
            self._status.update(workers={"running": 0, "wanted": workers}, message=None)
            self._status["stepsLost"] = self._ledger.steps_lost()
            self._status["phase"] = Phase.LOADING.value

    def end(self) -> None:
        """The worker group has ended: take in the last it wrote."""
        self.look()
        with self._lock:
            self._generation = None
            self._status["workers"] = {"running": 0, "wanted": self._status["workers"]["wanted"]}
            self._status["restarts"] = self._ledger.restarts()

    def look(self) -> None:
        """Take in what the workers wrote since the last look, and publish it."""
        with self._lock:
            if self._generation is not None:
                self._take_in(self._generation)
            self._publish()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_SECONDS):
            with suppress(OSError):  # a volume that is full now may be grown: the next look publishes everything
                self.look()

    def _take_in(self, generation: _GenerationFiles) -> None:
        for record in generation.steps.read():
            for tracker in self._trackers:
                tracker.step(record)
        for record in generation.events.read():
            self._ledger.append_record({**record, "generation": self._status["generation"]})
            if record["event"] == "evaluated":
                for tracker in self._trackers:
                    tracker.evaluated(record)
        progress = files.read_json(generation.logs.progress)
        if progress is None:
            return
        generation.progress = dict(progress)
        heartbeat = progress.pop("heartbeat")
        self._beats += heartbeat - generation.heartbeat
        generation.heartbeat = heartbeat
        for key in ("time", "part", "seconds"):
            progress.pop(key)
        started = round(progress.pop("startedAt") - self._began, 3)
        startup = {**self._status["startup"], "workers": started, **progress.pop("startup")}
        workers = {**self._status["workers"], "running": self._status["workers"]["wanted"]}
        self._status.update(progress, startup=startup, workers=workers)

    def _publish(self) -> None:
        now = time.time()
        if self._beats != self._heard[0]:
            self._heard = (self._beats, now)
        signs = {"time": now, "heartbeat": self._beats, "silentSeconds": round(now - self._heard[1], 1)}
        account = self._account.figures(now, self._generation.progress if self._generation else None)
        files.write_json(self._directory.status, {**signs, **self._status, **account}, durable=False)


class _GenerationFiles:
    """What the workers of a generation write, and how far it was read."""

    def __init__(self, logs: GenerationLogs) -> None:
        self.logs = logs
        self.steps = LineReader(logs.steps)
        self.events = LineReader(logs.events)
        self.heartbeat = 0
        self.progress: dict[str, Any] | None = None
