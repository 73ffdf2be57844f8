"""`spotune watch`: shows a job's progress until it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from spotune.crd.definition import FINETUNE_JOBS
from spotune_client.cluster.client import Cluster
from spotune_client.cluster.conditions import condition_heading, notable_conditions
from spotune_client.cluster.jobs import (
    Job,
    condition,
    is_true,
    outcome,
    phase,
    reason_and_message,
    status_of,
)
from spotune_client.waiting import polled, raise_if_failed
from spotune_operator.cli.status import (
    gpu_time,
    metrics_line,
    panel,
)

POLL_SECONDS: Final = 2.0
_LINE_EVERY_SECONDS: Final = 5.0


class View(Protocol):
    """An output for a job's status; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, job: Job) -> None:
        """Show the current state of the job."""

    def notify(self, text: str) -> None:
        """Show a message that is not part of the job's status."""


def watch_job(cluster: Cluster, name: str, view: View, wait: Callable[[float], None] = time.sleep) -> Job:
    """Show a job until it has ended, and return its final state.

    If the API server stops answering, polling continues: the job is not affected.

    Raises:
        UsageError: The job does not exist, or was deleted in the meantime.
        JobError: The job failed.
        KubernetesError: The API server does not answer the first request, or denies access.
    """
    with view:
        for job in polled(cluster, FINETUNE_JOBS, name, view.notify, wait):
            view.show(job)
            if outcome(job):
                break
    raise_if_failed(job)
    return job


class PlainView:
    """Writes a line for each new phase, each new notable condition, and every few seconds for the steps.

    Args:
        write: Prints one line, given without its line break.
        clock: Returns Unix time in seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._write = write
        self._clock = clock
        self._phase = ""
        self._shown: set[str] = set()
        self._step: int | None = None
        self._written = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, job: Job) -> None:
        """Write lines for what has changed."""
        now = self._clock()
        status = status_of(job)
        step = status.get("step")
        stepped = step != self._step and now - self._written >= _LINE_EVERY_SECONDS
        if phase(job) != self._phase or stepped:
            self._phase, self._step, self._written = phase(job), step, now
            total = status.get("totalSteps")
            steps = f"step {step or 0}/{total}" if total else ""
            known = ", ".join(part for part in (steps, metrics_line(status, now)) if part)
            self._write(f"{self._phase}: {known}" if known else self._phase)
        shown = {f"{condition_heading(found)}: {reason_and_message(found)}": found for found in notable_conditions(job)}
        for text, found in shown.items():
            if text not in self._shown:
                self._write(text)
                if is_true(job, "Stalled") and _is_shown_as(found, condition(job, "Stalled")) and not outcome(job):
                    self._write("waiting until this is mended; Ctrl-C ends the watch, not the job")
        self._shown = set(shown)

    def notify(self, text: str) -> None:
        """Write a line."""
        self._write(text)


def _is_shown_as(found: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Whether a condition is another one, or has its message: then it is shown in its place."""
    return other is not None and (found["type"] == other["type"] or found.get("message") == other.get("message"))


class JsonView(PlainView):
    """Writes the status as one line of JSON whenever it changes.

    Args:
        write: Prints one line, given without its line break.
        write_message: Prints a message elsewhere, because the output is for programs.
    """

    def __init__(self, write: Callable[[str], None], write_message: Callable[[str], None]) -> None:
        super().__init__(write)
        self._write_message = write_message

    def show(self, job: Job) -> None:
        """Write the status if it has changed."""
        text = json.dumps(status_of(job), sort_keys=True)
        if text not in self._shown:
            self._write(text)
        self._shown = {text}

    def notify(self, text: str) -> None:
        """Write a message."""
        self._write_message(text)


class LiveView:
    """A panel that is redrawn in place. Durations keep counting between two polls.

    Args:
        console: A terminal.
        clock: Returns Unix time in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._clock = clock
        self._job: Job | None = None
        self._live = Live(console=console, refresh_per_second=2, get_renderable=self._panel)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, job: Job) -> None:
        """Redraw the panel."""
        self._job = job
        self._live.refresh()

    def notify(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(Text(text, "yellow"), highlight=False)

    def _panel(self) -> RenderableType:
        return panel(self._job, self._clock()) if self._job is not None else Text("")


def completion_message(job: Job) -> str:
    """The last line for a job that has completed."""
    status = status_of(job)
    spent = f", GPU time {gpu_time(status)}" if gpu_time(status) else ""
    where = f"; the model is at {status['output']}" if status.get("output") else ""
    return f"{job['metadata']['name']} has completed ({status.get('step') or 0} steps{spent}){where}"
