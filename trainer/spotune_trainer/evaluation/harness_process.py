"""The process that runs lm-evaluation-harness: reads a request from standard input, writes results to a file.

The request is that of `spotune_trainer.evaluation.harness`. The results are those of `lm_eval.simple_evaluate`, or
`{"error": ...}` with the field below `training.evaluation.harness`, the reason and the remedy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

_TICK_SECONDS = 1.0


class TaskError(Exception):
    """A task cannot be used: the field below `training.evaluation.harness`, the reason and the remedy."""


def main() -> None:
    """Check the tasks, or evaluate the model on them."""
    request: dict[str, Any] = json.load(sys.stdin)
    ticks = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the harness prints is no tick
    output = Path(request["output"])
    if request["includePath"]:
        os.chdir(request["includePath"])  # relative names of data files begin there
    try:
        results = check(request) if request["action"] == "check" else evaluate(request, _ticker(ticks))
    except TaskError as error:
        results = {"error": str(error)}
    output.write_text(json.dumps(results, default=str), encoding="utf-8")


def check(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load the tasks and their data.

    Raises:
        TaskError: one is unknown, or cannot be loaded, or runs code that the model writes.
    """
    manager = _task_manager(request["tasks"], request["includePath"])
    for name in request["tasks"]:
        for task in _load(manager, name)["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False):
                raise TaskError(f".tasks: {name} runs code that the model writes: remove it")
    return {}


def evaluate(request: Mapping[str, Any], tick: Callable[..., None]) -> dict[str, Any]:
    """Evaluate the model on the tasks.

    Raises:
        TaskError: a task is unknown or fails.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    manager = _task_manager(request["tasks"], request["includePath"])
    try:
        model = HFLM(pretrained=request["model"], device=request["device"], batch_size=request["batchSize"])
        model.model.register_forward_hook(tick)
        results = simple_evaluate(
            model,
            tasks=list(request["tasks"]),
            num_fewshot=request["numFewshot"],
            limit=request["limit"] or None,
            apply_chat_template=request["chatTemplate"],
            task_manager=manager,
            log_samples=False,
        )
    except Exception as error:
        raise TaskError(f": the tasks failed on {request['model']} ({_described(error)})") from error
    return {name: results[name] for name in ("results", "groups", "versions", "n-shot", "n-samples") if name in results}


def _task_manager(names: Sequence[str], include_path: str | None) -> Any:
    """The tasks of a folder; those of the package too if the folder lacks one: to find these takes seconds.

    Raises:
        TaskError: a name is unknown.
    """
    from lm_eval.tasks import TaskManager

    if include_path:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            where = f"lm-eval {version('lm-eval')}" + (f" or {include_path}" if include_path else "")
            close = get_close_matches(name, manager.all_tasks, n=1)
            remedy = f"did you mean {close[0]}?" if close else "correct the name, or set includePath to its folder"
            raise TaskError(f".tasks: there is no task {name} in {where}: {remedy}")
    return manager


def _load(manager: Any, name: str) -> Any:
    try:
        return manager.load([name])
    except Exception as error:
        reason = "correct the task file, or make its data available"
        raise TaskError(f".tasks: {name} cannot be loaded ({_described(error)}): {reason}") from error


def _described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _ticker(ticks: TextIO) -> Callable[..., None]:
    """A function that prints a line, at most once a second; a reader that is gone ends this process."""
    last = 0.0

    def tick(*_: object) -> None:
        nonlocal last
        if time.monotonic() - last >= _TICK_SECONDS:
            last = time.monotonic()
            ticks.write("\n")
            ticks.flush()

    return tick


if __name__ == "__main__":
    main()
