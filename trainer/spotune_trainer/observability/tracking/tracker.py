"""Trackers receive a run's curves, and TensorBoard is one. The driver feeds them, so training never waits for them.

A run has one curve over all its generations. When a generation starts from step s, points after s are discarded, so no
step appears twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from spotune.formatting import scores_of
from spotune.job.training.metric import STEP_STATISTICS
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import tokens_of, training_seconds_of

_OF_EVERY_STEP = ("loss", "gradNorm", "learningRate", "epoch", "mfu")
STEP_CURVES = {f"train/{name}": name for name in (*_OF_EVERY_STEP, *chain(*STEP_STATISTICS.values()))}
"""Fields of `steps.jsonl` by curve: those of every step, and what the objectives compute beside the loss."""

_MARKUP = frozenset("\\`*_{}[]<>&#|~$!")


class Tracker(Protocol):
    """Receives the points of a run's curves."""

    def rewind(self, step: int) -> None:
        """Discard all points after `step`: a generation starts from there."""

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Log a line of `steps.jsonl`."""

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Log an `evaluated` event."""

    def log_harness(self, record: Mapping[str, Any]) -> None:
        """Log a `harness` event."""

    def close(self, phase: Phase) -> None:
        """Write what is buffered, since the driver ends. Unless `phase` is final, another driver continues the run."""


def step_point(record: Mapping[str, Any]) -> dict[str, float]:
    """Values by curve of a line of `steps.jsonl`, and its tokens per second. Missing values are left out.

    Tokens are all that go through the model (see `StepRecord.tokens`); lines of older files do not have their number.
    """
    tokens = tokens_of(record)
    values = {curve: record[name] for curve, name in STEP_CURVES.items() if record.get(name) is not None}
    values |= {f"train/{name}": value for name, value in record.get("metrics", {}).items()}
    if tokens is not None and (seconds := training_seconds_of(record)) > 0:
        values["train/tokensPerSecond"] = tokens / seconds
    return values


def evaluation_point(record: Mapping[str, Any]) -> dict[str, float]:
    """Values by curve of an `evaluated` event: its loss and its scores. Missing values are left out.

    The curves of a mixture's source end with its name, such as `eval/loss/<source>`.
    """
    loss = {"eval/loss": record["loss"]} if record.get("loss") is not None else {}
    by_source = {
        f"eval/{metric}/{source}": value
        for source, scores in record.get("evalBySource", {}).items()
        for metric, value in scores.items()
    }
    return loss | {f"eval/{metric}": value for metric, value in scores_of(record).items()} | by_source


def harness_point(record: Mapping[str, Any]) -> dict[str, float]:
    """Values by curve of a `harness` event, such as `harness/arc_easy/acc`."""
    return {f"harness/{name}": value for name, value in record["scores"].items()}


SAMPLES = "eval/samples"
"""Name under which trackers show generated answers."""


def samples_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The generated answers of an `evaluated` event as rows of a table, with a column for each metric's score."""
    return [
        {"prompt": each["prompt"], "answer": each["prediction"], "reference": each["reference"], **each["scores"]}
        for each in record.get("predictions") or ()
    ]


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as a Markdown table. Values may be any text: it is shown as it is."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as an HTML table. Values may be any text: it is shown as it is."""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(_text(value))}</td>' for value in row.values())}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    """A value for a Markdown table: one line, with entities for the characters that Markdown interprets."""
    return "".join(f"&#{ord(each)};" if each in _MARKUP else each for each in " ".join(_text(value).splitlines()))


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


class TensorBoardTracker:
    """Writes event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def rewind(self, step: int) -> None:
        """Open a new event file; TensorBoard hides the points of older files after `step` (`purge_step`)."""
        # Imported on first use: this takes seconds, which would delay each restart.
        from torch.utils.tensorboard import SummaryWriter

        self.close(Phase.LOADING)
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Add the points of a step."""
        self._add(step_point(record), record["step"])

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Add the points of an evaluation, and its generated answers as text."""
        self._add(evaluation_point(record), record["step"])
        if samples := samples_of(record):
            self._writer.add_text(SAMPLES, markdown_table(samples), record["step"])

    def log_harness(self, record: Mapping[str, Any]) -> None:
        """Add the scores of lm-evaluation-harness."""
        self._add(harness_point(record), record["step"])

    def close(self, phase: Phase) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for curve, value in values.items():
            self._writer.add_scalar(curve, value, step)
