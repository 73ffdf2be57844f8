"""Evaluates an exported model on tasks of lm-evaluation-harness, in a process of its own.

The harness changes seeds, log handlers and the working directory, and keeps data sets in memory. A process of its own
leaves the trainer untouched, and its scores are those of the harness's own command on the same folder.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from spotune.errors import InfrastructureError, JobError
from spotune.job import HarnessSpec

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


def check_tasks(spec: HarnessSpec) -> None:
    """Load the tasks and their data without a model, so that an error comes before training.

    Raises:
        JobError: the package is missing, a task is unknown, or a task or its data cannot be loaded.
        InfrastructureError: the process was killed.
    """
    if problem := missing_package():
        raise JobError(f"{FIELD}: {problem}")
    _run({"action": "check", **_request(spec)}, lambda: None)


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
        batch_size: requests per batch, unless the spec has one.
        heartbeat: called after forward passes, at most once a second.

    Raises:
        JobError: a task fails.
        InfrastructureError: the process was killed.
    """
    if problem := missing_package():
        raise JobError(f"{FIELD}: {problem}")
    model = {"model": str(export), "device": device, "batchSize": spec.batch_size or batch_size}
    return _run({"action": "evaluate", **_request(spec), **model}, heartbeat)


def harness_scores(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores in the results of the harness by `task/metric`, or `task/metric/filter` if the task has filters.

    Standard errors are left out. A group has scores of its own, beside those of its tasks.
    """
    scores: dict[str, float] = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, answer_filter = key.partition(",")
            is_score = comma and not metric.endswith("_stderr") and isinstance(value, int | float)
            if is_score and math.isfinite(value):
                name = f"{task}/{metric}" if answer_filter == "none" else f"{task}/{metric}/{answer_filter}"
                scores[name] = float(value)
    return scores


def _request(spec: HarnessSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude={"batch_size"})


def _run(request: Mapping[str, Any], heartbeat: Callable[[], None]) -> dict[str, Any]:
    """Run the process to its end, and return the results that it wrote.

    It prints a line after forward passes. If this process is killed, the next of these prints ends the other one.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results.json"), Path(folder, "log.txt")
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                [sys.executable, "-m", _PROCESS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={name: value for name, value in os.environ.items() if name not in _OF_THE_GROUP},
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps({**request, "output": str(results)}).encode())
                process.stdin.close()
                for _ in process.stdout:
                    heartbeat()
            except BaseException:
                process.kill()
                raise
            exit_code = process.wait()
        if not results.exists():
            *_, shown = "", *log.read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN_CHARACTERS:].splitlines()
            kind = InfrastructureError if exit_code < 0 else JobError
            raise kind(f"{FIELD}: the process of lm-evaluation-harness ended with exit code {exit_code}: {shown}")
        content: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    if "error" in content:
        raise JobError(f"{FIELD}{content['error']}")
    return content
