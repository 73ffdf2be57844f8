"""A worker's progress reports: heartbeat, phase, steps and events, in the folder of its generation.

Rank 0 writes these files from a background thread. The driver reads them and writes `status.json` and the ledger from
them. It reads only the generation that it started, so a worker of a superseded one cannot falsify either. Every rank
has a watchdog against hangs, which each heartbeat resets.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spotune.goodput import Part
from spotune_trainer import files
from spotune_trainer.bucket.generation_logs import GenerationLogUpload
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.background_writer import BackgroundWriter
from spotune_trainer.observability.stopwatch import Stopwatch
from spotune_trainer.observability.watchdog import Watchdog

logger = logging.getLogger("spotune.worker")

_WRITE_EVERY_SECONDS = 0.5
_RATE_WINDOW_STEPS = 50
_HEARTBEAT_WINDOW = 100
_NO_SECONDS = 1e-9
_COMPUTED_FIELDS = ("time", "heartbeatSeconds", "part", "seconds")
"""Fields of `progress.json` that are computed when it is written."""
_NOT_OF_STATUS = ("time", "heartbeat", "part", "seconds", "startedAt", "startup")
"""Fields of `progress.json` that are not those of `status.json`."""


@dataclass(frozen=True)
class StepRecord:
    """One line of `steps.jsonl`; `step` is the number of optimizer steps done after it.

    Attributes:
        loss: mean per label token (sft), labelled word (tokenClassification), text (classification), pair (dpo, simpo,
            reward), answer (kto) or sample (embedding); for orpo the mean per token of prompts and chosen answers, plus
            that per pair. None if it is not finite.
        skipped: whether the step changed no weights, since its loss or gradient was not finite.
        samples: hash over (id, token bytes) of the rows that went through backward, as 16 hex digits.
        tokens: all tokens that went through the model, over all ranks: the tokens of the encoder's or causal model's
            input, plus, for seq2seq models, the decoder's input tokens. Padding is not counted.
        labelTokens: label tokens that carried loss, over all ranks.
        seconds: wall time on rank 0 since the end of the previous step.
        productiveSeconds: the part of `seconds` without waiting for data and checkpoints and without evaluation.
        dataWaitSeconds: the part of `seconds` that was spent waiting for data.
        mfu: model FLOPs utilisation while training; None if the device's peak is not known.
        statistics: means over the samples by name, such as `rewardMargin` of preference objectives.
    """

    generation: int
    step: int
    epoch: float
    loss: float | None
    gradNorm: float | None  # noqa: N815 - the file's spelling
    learningRate: float  # noqa: N815
    tokens: int
    labelTokens: int  # noqa: N815
    seconds: float
    productiveSeconds: float  # noqa: N815
    dataWaitSeconds: float  # noqa: N815
    worldSize: int  # noqa: N815
    samples: str
    skipped: bool
    mfu: float | None
    statistics: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The line, with the statistics beside the other fields."""
        fields = dict(self.__dict__)
        return fields | dict(fields.pop("statistics"))


def tokens_of(record: Mapping[str, Any]) -> int | None:
    """All tokens of a line of `steps.jsonl`; None in older files, whose `tokens` were the label tokens."""
    return int(record["tokens"]) if "labelTokens" in record else None


def label_tokens_of(record: Mapping[str, Any]) -> int:
    """Label tokens of a line of `steps.jsonl`, also of an older file."""
    return int(record.get("labelTokens", record["tokens"]))


def training_seconds_of(record: Mapping[str, Any]) -> float:
    """Seconds of a line of `steps.jsonl` that rates count: without evaluations and waits for checkpoints.

    Older files do not have the wait for data, which counts: their whole time since the step before is returned.
    """
    if "dataWaitSeconds" not in record:
        return float(record["seconds"])
    return float(record["productiveSeconds"] + record["dataWaitSeconds"])


def status_fields(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `progress.json` that `status.json` has, too."""
    return {name: value for name, value in progress.items() if name not in _NOT_OF_STATUS}


class ProgressReporter:
    """Reports the progress of one rank; a context manager. Only rank 0 writes files; every rank sends heartbeats.

    Args:
        logs: the log folder of the generation.
        rank: of this process.
        hang_timeout_seconds: longest time between two heartbeats; then the watchdog ends the process.
        clock: seconds, monotonic.
        upload: copies the files to a bucket; None if the volume is the storage.
    """

    def __init__(
        self,
        logs: GenerationLogs,
        rank: int,
        hang_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        upload: GenerationLogUpload | None = None,
    ) -> None:
        self.logs = logs
        self.rank = rank
        self._watchdog = Watchdog(logs.stacks(rank), hang_timeout_seconds, clock)
        self._clock = clock
        self._upload = upload
        self.stopwatch = Stopwatch(clock)
        self._state: dict[str, Any] = {
            "startedAt": time.time(),
            "heartbeat": 0,
            "phase": Phase.LOADING.value,
            "startup": {},
        }
        self._last_write = self._startup_since = float("-inf")
        self._window: deque[tuple[float, float, int, int]] = deque(maxlen=_RATE_WINDOW_STEPS)
        self._report_window: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW_STEPS)
        self._last_reported_step: int | None = None
        self._reported_scores: dict[str, float] = {}
        self._last_heartbeat: float | None = None
        self._heartbeat_gaps: deque[float] = deque(maxlen=_HEARTBEAT_WINDOW)
        self._writer = BackgroundWriter()
        self._writes = rank == 0

    def __enter__(self) -> Self:
        self._watchdog.__enter__()
        if self.rank == 0:
            self._writer.start()
        if self._startup_since == float("-inf"):
            self._startup_since = self._clock()
        self.heartbeat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._write()
            if self.rank == 0:
                self._writer.close()
        finally:
            self._watchdog.__exit__(kind, error, trace)

    def heartbeat(self) -> None:
        """Report that the process makes progress: reset the watchdog and, if due, write `progress.json`."""
        self._state["heartbeat"] += 1
        self._watchdog.reset()
        now = self._clock()
        if self._last_heartbeat is not None:
            self._heartbeat_gaps.append(now - self._last_heartbeat)
        self._last_heartbeat = now
        self.write_if_due()

    def show_alive(self) -> None:
        """Report that the process runs, where nothing is known of its progress. The watchdog is not reset."""
        self._state["heartbeat"] += 1
        self.write_if_due()

    def continue_startup(self) -> None:
        """Continue the startup that another process of the rank has reported to `progress.json`.

        To be called before the context begins, which writes that file.
        """
        state = files.read_json(self.logs.progress)
        if state is None:
            return
        self._state |= {name: state[name] for name in ("startedAt", "heartbeat", "startup")}
        seconds = max(0.0, time.time() - state["startedAt"])
        self._startup_since = self._clock() - max(0.0, seconds - sum(state["startup"].values()))
        self.stopwatch.continue_from({Part.STARTUP: seconds})

    def hand_over(self) -> None:
        """Leave `progress.json` to another process of the rank; see `take_over`."""
        self._writes = False

    def take_over(self) -> None:
        """Continue what another process of the rank has reported to `progress.json`."""
        state = files.read_json(self.logs.progress)
        self._writes = self.rank == 0
        if state is None:
            return
        written = {name: value for name, value in state.items() if name not in _COMPUTED_FIELDS}
        self._state |= {**written, "startup": {**written["startup"], **self._state["startup"]}}
        self.stopwatch.continue_from({Part(name): seconds for name, seconds in state["seconds"].items()})

    def write_if_due(self) -> None:
        """Write `progress.json` if it was not written within the last half second. This is not a heartbeat."""
        if self._clock() - self._last_write >= _WRITE_EVERY_SECONDS:
            self._write()

    def set_phase(self, phase: Phase) -> None:
        """Begin a phase; written at once."""
        logger.info("%s", phase.value)
        self._state["phase"] = phase.value
        self.heartbeat()
        self._heartbeat_gaps.clear()  # those of another phase
        self._write()

    def record_startup(self, part: str) -> None:
        """Record the seconds that a part of the startup took: from the end of the previous part until now."""
        now = self._clock()
        self._state["startup"][part] = round(now - self._startup_since, 3)
        logger.info("%s took %.1f s", part, now - self._startup_since)
        self._startup_since = now
        self.heartbeat()

    def update(self, **values: Any) -> None:
        """Update fields of `progress.json`, which is written later."""
        self._state.update(values)

    def record_step(self, record: StepRecord, samples: int, total_steps: int) -> None:
        """Record an optimizer step that all ranks have finished.

        Args:
            record: its line for `steps.jsonl`.
            samples: number of samples in the step, for the rate while training.
            total_steps: steps of the whole run, for the remaining time.
        """
        line = record.as_json()
        self._append(self.logs.steps, line)
        self._window.append((record.seconds, training_seconds_of(line), record.tokens, samples))
        seconds, training_seconds, tokens, of_window = (sum(each) for each in zip(*self._window, strict=True))
        if record.loss is not None:
            self.update(loss=record.loss)
        self.update(
            step=record.step,
            totalSteps=total_steps,
            epoch=round(record.epoch, 4),
            gradNorm=record.gradNorm,
            learningRate=record.learningRate,
            mfu=record.mfu,
            tokensPerSecond=round(tokens / (training_seconds or _NO_SECONDS), 1),
            samplesPerSecond=round(of_window / (training_seconds or _NO_SECONDS), 1),
            etaSeconds=round((total_steps - record.step) * seconds / len(self._window), 1),
        )

    def record_report(
        self,
        *,
        generation: int,
        step: int,
        metrics: Mapping[str, float],
        seconds: float,
        productive_seconds: float,
        total_steps: int | None,
        world_size: int,
    ) -> None:
        """Record a step that a training function of the user has reported; its length is not known.

        Args:
            generation: of the worker group.
            step: number of steps done after it.
            metrics: finite numbers by name; `loss` and `epoch` are those of the status, the others are scores.
            seconds: since the report before.
            productive_seconds: those of them that were not spent waiting for checkpoints.
            total_steps: steps of the whole run, for the remaining time; None: it is not known.
            world_size: number of ranks.
        """
        loss = metrics.get("loss", metrics.get("train_loss"))
        times = {"seconds": round(seconds, 6), "productiveSeconds": round(productive_seconds, 6)}
        line = {"generation": generation, "step": step, "loss": loss, **times, "worldSize": world_size}
        self._append(self.logs.steps, {**line, "metrics": dict(metrics)})
        if loss is not None:
            self.update(loss=loss)
        scores = {name: value for name, value in metrics.items() if name not in ("loss", "epoch")}
        if scores:
            self._reported_scores |= scores
            self.update(evalScores=dict(self._reported_scores), evalStep=step)
        if "epoch" in metrics:
            self.update(epoch=metrics["epoch"])
        self.update(step=step)
        steps_before, self._last_reported_step = self._last_reported_step, step
        if total_steps is None or steps_before is None:
            return
        self._report_window.append((seconds, step - steps_before))
        seconds_of_a_step = sum(each for each, _ in self._report_window) / sum(each for _, each in self._report_window)
        self.update(totalSteps=total_steps, etaSeconds=round((total_steps - step) * seconds_of_a_step, 1))

    def record_event(self, name: str, **values: Any) -> None:
        """Append an event for the ledger; only rank 0 does."""
        self._append(self.logs.events, {"time": time.time(), "event": name, **values})

    def sync(self) -> None:
        """Write everything reported so far and fsync the steps, before a commit relies on them; from any thread.

        Raises:
            OSError: the volume, or the bucket, does not accept them yet.
        """
        if self.rank != 0:
            return
        if not self._writer.flush():
            raise OSError(errno.EAGAIN, "the log of the steps could not be written yet", str(self.logs.steps))
        if self.logs.steps.exists():
            files.fsync_file(self.logs.steps)
        if self._upload is not None:
            self._upload.push_steps()

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        if self.rank == 0:
            self._writer.append(path, record)

    def _write(self) -> None:
        self._last_write = self._clock()
        if self._writes:
            seconds = {part: round(value, 3) for part, value in self.stopwatch.seconds().items()}
            longest = round(max(self._heartbeat_gaps), 3) if self._heartbeat_gaps else None
            state = {
                "time": time.time(),
                **deepcopy(self._state),
                "heartbeatSeconds": longest,
                "part": self.stopwatch.part,
                "seconds": seconds,
            }
            self._writer.replace(self.logs.progress, state)
