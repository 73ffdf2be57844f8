"""Evaluates a model on tasks of lm-evaluation-harness, in a process of its own.

The harness changes seeds, log handlers and the working directory, and keeps data sets in memory. A process of its own
leaves the trainer untouched, and its scores are those of the harness's own command on the same folder.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self

from spotune.errors import InfrastructureError, JobError
from spotune.job import BestSpec, HarnessSpec
from spotune.job.training.metric import is_harness_metric

FIELD: Final = "training.evaluation.harness"
_PROCESS: Final = "spotune_trainer.evaluation.harness_process"
_SHOWN_CHARACTERS: Final = 500
_OF_THE_GROUP: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would make the process join the worker group."""


def missing_package() -> str | None:
    """Why the harness cannot run here, with the remedy; None if its package is installed."""
    if find_spec("lm_eval") is not None:
        return None
    return (
        "the package lm-eval is not installed: run pip install 'spotune[lm-eval]', on a cluster in the image that "
        "cluster.image names, or remove this field"
    )


def check_tasks(spec: HarnessSpec, best: BestSpec | None = None) -> None:
    """Load the tasks and their data without a model, so that an error comes before training.

    Args:
        spec: the tasks.
        best: how evaluations are compared; a score of tasks must be one of these.

    Raises:
        JobError: the package is missing, a task is unknown or not supported, a task or its data cannot be loaded, or no
            task has the score that `best` names.
        InfrastructureError: the process was killed.
    """
    request: dict[str, Any] = {"action": "check"}
    if best is not None and is_harness_metric(best.metric):
        request["best"] = {"metric": best.metric, "prefersLower": best.prefers_lower}
    with HarnessProcess(spec, request) as process:
        process.finish()


def evaluate_export(
    spec: HarnessSpec,
    export: Path,
    *,
    device: str,
    batch_size: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The results of the harness for a folder with a model, as its own command writes them.

    Args:
        spec: the tasks.
        export: the folder, for `from_pretrained` of transformers.
        device: where the model runs, as PyTorch names it.
        batch_size: requests per batch.
        heartbeat: called after forward passes, at most once a second.

    Raises:
        JobError: a task fails.
        InfrastructureError: the process was killed.
    """
    model = {"model": str(export), "device": device, "batchSize": batch_size}
    with HarnessProcess(spec, {"action": "evaluate", **model}) as process:
        return process.finish(heartbeat)


def harness_scores(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores in the results of the harness, by `score_name`.

    Standard errors are left out. A group has scores of its own, beside those of its tasks.
    """
    scores: dict[str, float] = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, answer_filter = key.partition(",")
            is_score = comma and not metric.endswith("_stderr") and isinstance(value, int | float)
            if is_score and math.isfinite(value):
                scores[score_name(task, metric, answer_filter)] = float(value)
    return scores


def score_name(task: str, metric: str, answer_filter: str) -> str:
    """Name of a score: `task/metric`, or `task/metric/filter` if the task has filters."""
    return f"{task}/{metric}" if answer_filter == "none" else f"{task}/{metric}/{answer_filter}"


class HarnessProcess:
    """The process of the harness at work. A context manager, which kills the process unless it has ended.

    The process prints lines as it works. If this process is killed, the next of these prints ends the other one.

    Args:
        spec: the tasks.
        request: what to do with them; see `harness_process.py`.

    Raises:
        JobError: the package is missing.
    """

    def __init__(self, spec: HarnessSpec, request: Mapping[str, Any]) -> None:
        if problem := missing_package():
            raise JobError(f"{FIELD}: {problem}")
        self._request = {**request, **spec.model_dump(mode="json", exclude={"batch_size"})}
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._results, self._log = folder / "results.json", folder / "log.txt"
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PROCESS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(self._log.open("wb")),
                env={name: value for name, value in os.environ.items() if name not in _OF_THE_GROUP},
            )
            stack.callback(self._stop)
            self._reader = threading.Thread(target=self._read, name="harness", daemon=True)
            self._reader.start()
            self.write({**self._request, "output": str(self._results)})
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, value: Any) -> None:
        """Send the process a line: its request, or an answer. If it has ended, `results` says why."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def next_line(self, timeout: float | None = None) -> bytes | None:
        """The next line that the process prints; None once it has ended.

        Args:
            timeout: seconds to wait; None: without limit.

        Raises:
            queue.Empty: the process printed nothing.
        """
        return self._lines.get(timeout=timeout)

    def finish(self, heartbeat: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for the end of the process, with a heartbeat for each line; returns `results`."""
        while self.next_line() is not None:
            heartbeat()
        return self.results()

    def results(self) -> dict[str, Any]:
        """What the process wrote before it ended.

        Raises:
            JobError: a task fails, or cannot be used.
            InfrastructureError: the process was killed.
        """
        exit_code = self._process.wait()
        if not self._results.exists():
            log = self._log.read_text(encoding="utf-8", errors="replace").strip()
            *_, shown = "", *log[-_SHOWN_CHARACTERS:].splitlines()
            kind = InfrastructureError if exit_code < 0 else JobError
            raise kind(f"{FIELD}: the process of lm-evaluation-harness ended with exit code {exit_code}: {shown}")
        content: dict[str, Any] = json.loads(self._results.read_text(encoding="utf-8"))
        if "error" in content:
            raise JobError(f"training.evaluation{content['error']}")
        return content

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _stop(self) -> None:
        self._process.kill()
        self._reader.join()
        with suppress(BrokenPipeError), self._process:  # closes its pipes
            pass
