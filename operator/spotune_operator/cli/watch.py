"""`spotune watch`: how a job goes, until it has ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from spotune.errors import JobError, UsageError
from spotune_operator.cli.cluster.client import Cluster
from spotune_operator.cli.cluster.jobs import Job, condition, get_job, outcome, sentence, status_of
from spotune_operator.cli.status import figures, gpu_time, heading, noteworthy, panel, phase
from spotune_operator.errors import KubernetesError, RefusedError

POLL_SECONDS: Final = 2.0
_LINE_EVERY_SECONDS: Final = 5.0


class View(Protocol):
    """What a job is shown on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, job: Job) -> None:
        """The job as it is now."""

    def say(self, text: str) -> None:
        """Something else that has to be known."""


def watch_job(cluster: Cluster, name: str, view: View, wait: Callable[[float], None] = time.sleep) -> Job:
    """Show a job until it has ended; the job as it was then.

    An API server that does not answer is asked again for as long as it takes: the job goes on meanwhile.

    Raises:
        UsageError: There is no such job, or it was deleted meanwhile.
        JobError: It failed.
        KubernetesError: The API server does not answer the first time, or forbids to look.
    """
    job = get_job(cluster, name)
    silent = False
    with view:
        while True:
            view.show(job)
            if ended := outcome(job):
                break
            wait(POLL_SECONDS)
            try:
                job = get_job(cluster, name)
                silent = False
            except RefusedError:
                raise
            except UsageError as error:
                raise UsageError(f"{name} was deleted before it had ended") from error
            except KubernetesError as error:
                if not silent:
                    view.say(f"{error}; trying again")
                silent = True
    if ended == "Failed":
        found = condition(job, "Failed") or {}
        raise JobError(f"{name} failed: {found.get('message') or 'nobody says why'}")
    return job


class PlainView:
    """A line for each change of phase and of what is noteworthy, and now and then one about the steps.

    Args:
        write: Takes a line without its end.
        clock: Unix time in seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._write = write
        self._clock = clock
        self._phase = ""
        self._said: set[str] = set()
        self._step: int | None = None
        self._written = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, job: Job) -> None:
        """Write a line where there is something new."""
        now = self._clock()
        status = status_of(job)
        step = status.get("step")
        stepped = step != self._step and now - self._written >= _LINE_EVERY_SECONDS
        if phase(job) != self._phase or stepped:
            self._phase, self._step, self._written = phase(job), step, now
            total = status.get("totalSteps")
            steps = f"step {step or 0}/{total}" if total else ""
            known = ", ".join(part for part in (steps, figures(status, now)) if part)
            self._write(f"{self._phase}: {known}" if known else self._phase)
        said = {f"{heading(found)}: {sentence(found)}": None for found in noteworthy(job)}
        for text in said:
            if text not in self._said:
                self._write(text)
        self._said = set(said)

    def say(self, text: str) -> None:
        """Write a line."""
        self._write(text)


class JsonView(PlainView):
    """The status as a line of JSON, whenever it is another one."""

    def show(self, job: Job) -> None:
        """Write the status if it has changed."""
        text = json.dumps(status_of(job), sort_keys=True)
        if text not in self._said:
            self._write(text)
        self._said = {text}

    def say(self, text: str) -> None:
        """Nothing: programs read the statuses."""


class LiveView:
    """A panel that is redrawn in place; times go on between two looks at the job.

    Args:
        console: A terminal.
        clock: Unix time in seconds.
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

    def say(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(Text(text, "yellow"), highlight=False)

    def _panel(self) -> RenderableType:
        return panel(self._job, self._clock()) if self._job is not None else Text("")


def ending(job: Job) -> str:
    """What is said of a job that is complete."""
    status = status_of(job)
    spent = f", GPU time {gpu_time(status)}" if gpu_time(status) else ""
    where = f"; the model is at {status['output']}" if status.get("output") else ""
    return f"{job['metadata']['name']} is trained ({status.get('step') or 0} steps{spent}){where}"
