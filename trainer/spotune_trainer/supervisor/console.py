"""Display of a run: a live panel in a terminal, plain lines elsewhere, and a table of results at the end.

Both views get the newest status and messages about events; neither reads a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spotune.formatting import (
    duration,
    evaluation,
    goodput,
    progress,
    restarts,
    score,
    scores_of,
)

_LINE_EVERY_SECONDS = 5.0
_MESSAGE_LENGTH = 200


class View(Protocol):
    """Shows a run to people."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, status: Mapping[str, Any]) -> None:
        """Show the newest status."""

    def log(self, text: str) -> None:
        """Show a message about an event."""


class PlainView:
    """Writes a line for each event and each change of phase, and one every few seconds while steps are made.

    Args:
        write: takes a line without line break.
        clock: monotonic seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._phase: str | None = None
        self._last_message: str | None = None
        self._written_at = float("-inf")
        self._step: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, status: Mapping[str, Any]) -> None:
        """Write a line if the phase has changed, or for a new step every few seconds."""
        self._show_message(status.get("message"))
        new_phase = status["phase"] != self._phase
        stepped = status.get("step") != self._step and self._clock() - self._written_at >= _LINE_EVERY_SECONDS
        if not new_phase and not stepped:
            return
        self._phase, self._step = status["phase"], status.get("step")
        self._written_at = self._clock()
        line = progress(status)
        self._write(f"{self._phase}: {line}" if line else str(self._phase))

    def log(self, text: str) -> None:
        """Write a line."""
        self._last_message = text
        self._write(text)

    def _show_message(self, message: str | None) -> None:
        """Write the status's message, unless the last event contained it already."""
        if message and message != self._last_message and message not in (self._last_message or ""):
            self.log(message)


class LiveView:
    """Redraws a panel in place; events scroll above it."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        self._live.update(Text(f"{self._name}: starting"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, status: Mapping[str, Any]) -> None:
        """Redraw the panel."""
        self._live.update(panel(self._name, status))

    def log(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(Text(text), highlight=False)


def panel(name: str, status: Mapping[str, Any]) -> RenderableType:
    """The state of a run on a few lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row(Text(name, style="bold not dim"), Text(str(status["phase"]), style="bold"))
    table.add_row("progress", _progress_line(status))
    if (text := progress({**status, "step": None, "totalSteps": None})) != "":
        table.add_row("", text)
    workers = status.get("workers") or {}
    table.add_row("workers", f"{workers.get('running', 0)}/{workers.get('wanted', 0)}")
    table.add_row("last commit", _checkpoint(status))
    table.add_row("restarts", restarts(status.get("restarts") or {}))
    if status.get("goodput") is not None:
        table.add_row("goodput", goodput(status["goodput"], status.get("goodputParts") or {}))
    if status.get("evalLoss") is not None:
        table.add_row("evaluation", evaluation(status["evalLoss"], status.get("evalScores") or {}))
    if status.get("message"):
        table.add_row("message", Text(str(status["message"])[:_MESSAGE_LENGTH], style="yellow"))
    return table


def _progress_line(status: Mapping[str, Any]) -> RenderableType:
    step, total = status.get("step") or 0, status.get("totalSteps")
    if not total:
        return Text("step -")
    line = Table.grid(padding=(0, 1))
    line.add_row(ProgressBar(total=total, completed=step, width=40), f"step {step}/{total}")
    return line


def _checkpoint(status: Mapping[str, Any]) -> str:
    checkpoint = status.get("lastCheckpoint")
    if not checkpoint:
        return "none yet"
    age = duration(max(0.0, time.time() - checkpoint["time"]))
    return f"step {checkpoint['step']}, {age} ago"


def summary(name: str, result: Mapping[str, Any]) -> RenderableType:
    """A table of the results of a finished run.

    Args:
        name: of the job.
        result: content of `result.json`. Its `tokens` are all that went through the model, without padding; `mfu`, from
            measured step times, is known on GPUs only. Values that are not known are left out.
    """
    rows: dict[str, tuple[str, Callable[[Any], str]]] = {
        "steps": ("steps", "{:,}".format),
        "samples": ("samples", "{:,}".format),
        "tokens": ("tokens", "{:,}".format),
        "tokensPerSecond": ("tokens/s", "{:,.0f}".format),
        "samplesPerSecond": ("samples/s", "{:,.1f}".format),
        "mfu": ("MFU", "{:.1%}".format),
        "wallSeconds": ("wall clock", duration),
        "restarts": ("restarts", str),
        "goodput": ("goodput", lambda value: goodput(value, result.get("goodputParts") or {})),
        "trainLoss": ("mean loss", "{:.4f}".format),
        "evalLoss": ("evaluation loss", "{:.4f}".format),
        "best": ("best evaluation", lambda best: f"{best['metric']} {best['value']:.4g} after step {best['step']}"),
        "exportProblem": ("problem", str),
        "peakMemoryBytes": ("peak memory of a worker", lambda value: f"{value / 1e9:.2f} GB"),
        "export": ("model", str),
    }
    table = Table(title=f"{name} is trained", title_justify="left", show_header=False, box=None, padding=(0, 2))
    for field, (label, form) in rows.items():
        if result.get(field) is not None:
            table.add_row(label, form(result[field]))
        if field == "evalLoss":
            for metric, value in scores_of(result).items():
                table.add_row(*score(metric, value))
    return table
