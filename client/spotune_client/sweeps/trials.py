"""The trials of a FinetuneSweep, the best first, and how their values are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotune.job.training.metric import lower_is_better
from spotune_client.cluster.jobs import status_of

Sweep = Mapping[str, Any]
"""A FinetuneSweep as the API server returns it."""
Trial = Mapping[str, Any]
"""An entry of its ``status.trials``."""


def metric_of(sweep: Sweep) -> str:
    """The metric that trials are compared by."""
    return str((sweep["spec"].get("objective") or {}).get("metric") or "loss")


def sorted_trials(sweep: Sweep) -> list[Trial]:
    """The trials, the best value first: complete ones, then all others with a value, then those without."""
    metric, mode = metric_of(sweep), (sweep["spec"].get("objective") or {}).get("mode") or "auto"
    is_lower_better = lower_is_better(metric) if mode == "auto" else mode == "minimize"
    sign = 1 if is_lower_better else -1

    def order(trial: Trial) -> tuple[bool, bool, float, int]:
        value = trial.get("value")
        without = value is None
        return trial.get("state") != "Complete", without, 0.0 if value is None else sign * value, trial["number"]

    return sorted(status_of(sweep).get("trials") or (), key=order)


def paths_of(trials: Sequence[Trial]) -> list[str]:
    """The fields that the trials set."""
    return sorted({path for trial in trials for path in trial.get("parameters") or {}})


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """A heading for each field: its last part, or the whole path where two have the same."""
    last = [path.rpartition(".")[2] for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}


def shown_value(value: Any) -> str:
    """A parameter or an objective for display; empty without one."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)


def last_step(trial: Trial) -> str:
    """Step of the last evaluation of a trial; empty before the first."""
    evaluations = trial.get("evaluations") or ()
    return str(evaluations[-1]["step"]) if evaluations else ""


def as_json(sweep: Sweep) -> dict[str, Any]:
    """Name, namespace and status, with the trials in the order of the table."""
    metadata = {key: sweep["metadata"][key] for key in ("name", "namespace")}
    return {**metadata, "status": {**status_of(sweep), "trials": sorted_trials(sweep)}}
