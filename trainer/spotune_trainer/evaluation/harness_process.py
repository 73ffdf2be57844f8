"""The process that runs lm-evaluation-harness: reads a request from standard input, writes results to a file.

The request is that of `spotune_trainer.evaluation.harness`, in one line. The results are those of
`lm_eval.simple_evaluate`, or `{"error": ...}` with the field below `training.evaluation`, the reason and the remedy.

The process prints empty lines as it works. If workers hold the model (`harness_model.py`), it also prints questions to
the model, each as JSON in one line, and reads each answer from standard input, as JSON in one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from spotune_trainer.evaluation.harness import score_name

_TICK_SECONDS = 1.0


class TaskError(Exception):
    """A task cannot be used: the field below `training.evaluation`, the reason and the remedy."""


def main() -> None:
    """Check the tasks, or evaluate the model on them."""
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the harness prints is no tick
    output = Path(request["output"])
    if request["includePath"]:
        os.chdir(request["includePath"])  # relative names of data files begin there
    try:
        results = check(request) if request["action"] == "check" else evaluate(request, lines)
    except TaskError as error:
        results = {"error": str(error)}
    output.write_text(json.dumps(results, default=str), encoding="utf-8")


def check(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load the tasks and their data.

    Raises:
        TaskError: one is unknown, or cannot be loaded, or is not supported; or none has the score that is to be the
            best.
    """
    manager = _task_manager(request["tasks"], request["includePath"])
    directions: dict[str, bool | None] = {}
    for name in request["tasks"]:
        loaded = _load(manager, name)
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False):
                raise TaskError(f".harness.tasks: {name} runs code that the model writes: remove it")
            if request["everySteps"] and (task.get_config("generation_kwargs") or {}).get("do_sample"):
                reason = "samples its answers (do_sample), which everySteps does not support"
                raise TaskError(f".harness.tasks: {name} {reason}: remove it, or set everySteps to 0")
        directions |= score_directions(loaded)
    if best := request.get("best"):
        _check_best(best, directions)
    return {}


def score_directions(loaded: Mapping[str, Any]) -> dict[str, bool | None]:
    """The scores that loaded tasks and groups will have, and whether higher values are better; None: unknown."""
    found: dict[str, bool | None] = {}
    filters: set[str] = set()
    for name, task in loaded["tasks"].items():
        better, own_filters = task.higher_is_better(), {each.name for each in getattr(task, "_filters", ())}
        filters |= own_filters
        for metric in task.aggregation():
            for each in own_filters:
                found[score_name(name, metric, each)] = better.get(metric)
    for name, group in loaded["groups"].items():
        for aggregated in group.aggregate_metric_list or ():
            for each in aggregated.filter_list or filters:
                found[score_name(name, aggregated.metric, each)] = None
    return found


def _check_best(best: Mapping[str, Any], directions: Mapping[str, bool | None]) -> None:
    metric = best["metric"]
    if metric not in directions:
        close = get_close_matches(metric, directions, n=1) or sorted(directions)[:3]
        known = ", ".join(close)
        raise TaskError(f".best.metric: the tasks have no score {metric}: use one of theirs, such as {known}")
    if directions[metric] is best["prefersLower"]:
        better = "higher" if directions[metric] else "lower"
        mode = "max" if directions[metric] else "min"
        raise TaskError(f".best.mode: {better} values of {metric} are better: set {mode}")


def evaluate(request: Mapping[str, Any], lines: TextIO) -> dict[str, Any]:
    """Evaluate the model on the tasks.

    Raises:
        TaskError: a task is unknown or fails.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from spotune_trainer.evaluation.harness_model import WorkersModel

    manager = _task_manager(request["tasks"], request["includePath"])
    device, held_by_workers = request.get("device"), request["action"] == "ask"
    try:
        if held_by_workers:
            model = WorkersModel(request["model"], partial(_ask, lines))
        else:
            model = HFLM(pretrained=request["model"], device=device, batch_size=request["batchSize"])
            model.model.register_forward_hook(_ticker(lines))
        results = simple_evaluate(
            model,
            tasks=list(request["tasks"]),
            num_fewshot=request["numFewshot"],
            limit=request["limit"] or None,
            apply_chat_template=request["chatTemplate"],
            task_manager=manager,
            log_samples=False,
            **({"bootstrap_iters": 0} if held_by_workers else {}),  # they wait; its standard errors are not used
        )
    except Exception as error:
        where = "the model in training" if held_by_workers else request["model"]
        raise TaskError(f".harness: the tasks failed on {where} ({_described(error)})") from error
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
            raise TaskError(f".harness.tasks: there is no task {name} in {where}: {remedy}")
    return manager


def _load(manager: Any, name: str) -> Any:
    try:
        return manager.load([name])
    except Exception as error:
        reason = "correct the task file, or make its data available"
        raise TaskError(f".harness.tasks: {name} cannot be loaded ({_described(error)}): {reason}") from error


def _described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _ask(lines: TextIO, question: Mapping[str, Any]) -> Any:
    """The answer of the process that started this one; ends this process if that one has gone."""
    lines.write(f"{json.dumps(question)}\n")
    lines.flush()
    answer = sys.stdin.readline()
    if not answer:
        sys.exit("the trainer has gone")
    return json.loads(answer)


def _ticker(lines: TextIO) -> Callable[..., None]:
    """A function that prints a line, at most once a second; a reader that is gone ends this process."""
    last = 0.0

    def tick(*_: object) -> None:
        nonlocal last
        if time.monotonic() - last >= _TICK_SECONDS:
            last = time.monotonic()
            lines.write("\n")
            lines.flush()

    return tick


if __name__ == "__main__":
    main()
