"""Trackers: where curves go. The driver feeds them from `steps.jsonl`, so training never waits for one.

One run has one curve over all its generations: when a generation starts from step s, what was logged after s is taken
back, and nothing appears twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from spotune.formatting import scores_of
from spotune_trainer.observability.progress import Phase

STEP_CURVES = {
    "train/loss": "loss",
    "train/gradNorm": "gradNorm",
    "train/learningRate": "learningRate",
    "train/epoch": "epoch",
    "train/mfu": "mfu",
}


class Tracker(Protocol):
    """Takes points of curves."""

    def rewind(self, step: int) -> None:
        """A generation starts after `step`: forget what came after it."""

    def step(self, record: Mapping[str, Any]) -> None:
        """A line of `steps.jsonl`."""

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """An `evaluated` event."""

    def close(self, phase: Phase) -> None:
        """Write out what is buffered: the driver ends in a phase, in which the run is done, has failed, or goes on."""


def step_point(record: Mapping[str, Any]) -> dict[str, float]:
    """Values by curve of a line of `steps.jsonl`, with its throughput; those that the step has not are left out."""
    values = {curve: record[name] for curve, name in STEP_CURVES.items() if record.get(name) is not None}
    return values | ({"train/tokensPerSecond": record["tokens"] / record["seconds"]} if record["seconds"] > 0 else {})


def evaluation_point(record: Mapping[str, Any]) -> dict[str, float]:
    """Values by curve of an `evaluated` event: its loss, and the scores that are known."""
    loss = {"eval/loss": record["loss"]} if record.get("loss") is not None else {}
    return loss | {f"eval/{metric}": value for metric, value in scores_of(record).items()}


class TensorBoardTracker:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def rewind(self, step: int) -> None:
        """Open a new event file whose points replace those after `step`."""
        # Imported on use: TensorBoard's writer takes seconds that a restart need not wait for.
        from torch.utils.tensorboard import SummaryWriter

        self.close(Phase.LOADING)
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def step(self, record: Mapping[str, Any]) -> None:
        """Add the step's curves, with its throughput."""
        self._add(step_point(record), record["step"])

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Add the evaluation's curves."""
        self._add(evaluation_point(record), record["step"])

    def close(self, phase: Phase) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for curve, value in values.items():
            self._writer.add_scalar(curve, value, step)
