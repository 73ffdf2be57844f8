"""Publishes `status.json`, ledger events and tracker curves from the files that a generation's workers write.

A thread of the driver is the only writer of `status.json`. The published heartbeat grows only if the driver or the
workers make progress, not because this thread runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spotune_trainer import files
from spotune_trainer.files import LineReader
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.goodput_ledger import GoodputMeter
from spotune_trainer.observability.progress import status_fields
from spotune_trainer.observability.surviving_workers import WORKERS_TRAIN_ON
from spotune_trainer.observability.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 0.5
_KEPT_FROM_LAST_ATTEMPT = (
    "step",
    "totalSteps",
    "loss",
    "evalLoss",
    "evalScores",
    "evalStep",
    "evalBySource",
    "best",
    "lastCheckpoint",
    "dataLeftOut",
)
_OF_LAST_STEP = (
    "epoch",
    "loss",
    "learningRate",
    "gradNorm",
    "tokensPerSecond",
    "samplesPerSecond",
    "mfu",
    "etaSeconds",
    "heartbeatSeconds",
)
"""Fields that describe the last step, or the speed of the group that trained it."""
_EMPTY_STATUS: dict[str, Any] = dict.fromkeys(
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
        "evalStep",
        "evalBySource",
        "best",
        "stoppedEarly",
        "exportProblem",
        "harnessProblem",
        "exportStep",
        "tokensPerSecond",
        "samplesPerSecond",
        "mfu",
        "etaSeconds",
        "heartbeatSeconds",
        "lastCheckpoint",
        "checkpointProblem",
        "dataLeftOut",
        "resumedFromStep",
        "ownSeconds",
        "slowestRanks",
        "stragglers",
        "message",
        "adopting",
    )
)


class StatusPublisher:
    """Publishes the status of a run. A context manager around the driver's work; methods may be called from any thread.

    Args:
        directory: of the job.
        ledger: gets the events of the workers.
        attempt: number of this attempt.
        trackers: get step and evaluation records; closed at exit.
        unfit_nodes: returns the nodes that are left out.
    """

    def __init__(
        self,
        directory: JobDirectory,
        ledger: Ledger,
        attempt: int,
        trackers: Sequence[Tracker],
        unfit_nodes: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._trackers = trackers
        self._unfit_nodes = unfit_nodes
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-publisher", daemon=True)
        previous = files.read_json(directory.status) or {}
        self._heartbeat = int(previous.get("heartbeat", 0)) + 1
        self._group_started_at = time.time()
        self._status: dict[str, Any] = {
            **_EMPTY_STATUS,
            **{name: previous.get(name) for name in _KEPT_FROM_LAST_ATTEMPT},
            "phase": Phase.PREPARING.value,
            "generation": int(previous.get("generation", 0)),
            "attempt": attempt,
            "workers": {"running": 0, "wanted": 0},
            "restarts": previous.get("restarts") or ledger.restarts(),
            "stepsLost": ledger.steps_lost(),
            "startup": {},
        }
        self._generation: _GenerationFiles | None = None
        self._goodput = GoodputMeter(directory)
        self._last_heartbeat = (self._heartbeat, time.time())

    def __enter__(self) -> StatusPublisher:
        self._publish()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.refresh()
        for tracker in self._trackers:
            tracker.close(Phase(self._status["phase"]))

    def update(self, phase: Phase | None = None, **values: Any) -> None:
        """Set the phase and other fields, increment the heartbeat, and publish at once."""
        with self._lock:
            self._heartbeat += 1
            self._status.update(values)
            if phase is not None:
                self._status["phase"] = phase.value
            self._publish()

    def record_startup(self, part: str, seconds: float) -> None:
        """Record the seconds that a part of the driver's startup took."""
        with self._lock:
            self._status["startup"] = {**self._status["startup"], part: round(seconds, 3)}

    def start_generation(self, generation: int, first_step: int, workers: int) -> None:
        """Reset the status for a new worker group, which has `first_step` steps behind it.

        What was measured at a later step is removed: the group goes back, and makes that step again.
        """
        with self._lock:
            if self._status["step"] != first_step:
                self._status.update(dict.fromkeys(_OF_LAST_STEP))
            for tracker in self._trackers:
                tracker.rewind(first_step)
            self._generation = _GenerationFiles(self._directory.generation_logs(generation))
            self._group_started_at = time.time()
            self._status.update(generation=generation, step=first_step, resumedFromStep=first_step)
            self._status.update(ownSeconds=None, slowestRanks=None, stragglers=None)
            self._status.update(workers={"running": 0, "wanted": workers}, message=None)
            self._status["stepsLost"] = self._ledger.steps_lost()
            self._status["phase"] = Phase.LOADING.value

    def adopt_generation(self, started: Mapping[str, Any]) -> None:
        """Publish what a worker group does that an earlier driver has started and that trains on.

        Args:
            started: its `generation-started` event.
        """
        with self._lock:
            for tracker in self._trackers:  # they get all of its steps again
                tracker.rewind(started["step"])
            generation = started["generation"]
            copied = [event for event in self._ledger.records() if event.get("generation") == generation]
            self._generation = _GenerationFiles(self._directory.generation_logs(generation), copied)
            self._group_started_at = started["time"]
            workers = {"running": 0, "wanted": started["worldSize"]}
            self._status.update(generation=generation, resumedFromStep=started["step"], workers=workers)
            self._status["message"] = WORKERS_TRAIN_ON
            self._status["phase"] = Phase.LOADING.value
            self._read(self._generation)
            self._publish()

    def finish_generation(self, phase: Phase | None = None) -> None:
        """Read the last records of the worker group, which has exited or is to be ended.

        Args:
            phase: what the run does next; None: what follows publishes it.
        """
        self.refresh()
        with self._lock:
            self._generation = None
            if phase is not None:
                self._status["phase"] = phase.value
            self._status["workers"] = {"running": 0, "wanted": self._status["workers"]["wanted"]}
            self._status["restarts"] = self._ledger.restarts()

    def refresh(self) -> None:
        """Read what the workers wrote since the last call, and publish the status."""
        with self._lock:
            if self._generation is not None:
                self._read(self._generation)
            self._publish()

    def _run(self) -> None:
        while not self._stop.wait(_REFRESH_SECONDS):
            try:
                self.refresh()
            except OSError:
                pass  # the volume may be full for a while; the next refresh publishes everything
            except Exception:  # a bug in one refresh must not end those of the whole run
                logger.exception("the status could not be refreshed, because of a bug of spotune")

    def _read(self, generation: _GenerationFiles) -> None:
        for record in generation.steps.read():
            for tracker in self._trackers:
                tracker.log_step(record)
        generation.new_events.extend(generation.events.read())
        while generation.new_events:
            record = generation.new_events[0]
            if not generation.is_copied(record):
                self._ledger.append_record({**record, "generation": self._status["generation"]})
            generation.new_events.popleft()  # not before: the volume may be full
            for tracker in self._trackers:
                if record["event"] == "evaluated":
                    tracker.log_evaluation(record)
                elif record["event"] == "harness":
                    tracker.log_harness(record)
        progress = files.read_json(generation.logs.progress)
        if progress is None:
            return
        generation.progress = progress
        self._heartbeat += progress["heartbeat"] - generation.heartbeat
        generation.heartbeat = progress["heartbeat"]
        started = round(progress["startedAt"] - self._group_started_at, 3)
        startup = {**self._status["startup"], "workers": started, **progress["startup"]}
        workers = {**self._status["workers"], "running": self._status["workers"]["wanted"]}
        self._status.update(status_fields(progress), startup=startup, workers=workers)

    def _publish(self) -> None:
        now = time.time()
        if self._heartbeat != self._last_heartbeat[0]:
            self._last_heartbeat = (self._heartbeat, now)
        liveness = {"time": now, "heartbeat": self._heartbeat, "silentSeconds": round(now - self._last_heartbeat[1], 1)}
        goodput = self._goodput.metrics(now, self._generation.progress if self._generation else None)
        nodes = {"unfitNodes": self._unfit_nodes()}
        files.write_json(self._directory.status, {**liveness, **self._status, **nodes, **goodput}, durable=False)


class _GenerationFiles:
    """Files that the workers of a generation write, how far each has been read, and events not yet in the ledger.

    Args:
        logs: their folder.
        copied: events that are in the ledger already.
    """

    def __init__(self, logs: GenerationLogs, copied: Sequence[Mapping[str, Any]] = ()) -> None:
        self.logs = logs
        self._copied = {(event["time"], event["event"]) for event in copied}
        self.steps = LineReader(logs.steps)
        self.events = LineReader(logs.events)
        self.new_events: deque[dict[str, Any]] = deque()
        self.heartbeat = 0
        self.progress: dict[str, Any] | None = None

    def is_copied(self, event: Mapping[str, Any]) -> bool:
        """Whether an event of the workers is in the ledger already."""
        return (event["time"], event["event"]) in self._copied
