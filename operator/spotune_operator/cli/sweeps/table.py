"""`spotune sweep` in the terminal: how a sweep is, and a table of its trials, the best first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotune.formatting import duration
from spotune.job.training.metric import lower_is_better
from spotune_operator.cli.cluster.jobs import conditions_of, status_of
from spotune_operator.cli.status import details_grid

Sweep = Mapping[str, Any]
"""A FinetuneSweep as the API server returns it."""
Trial = Mapping[str, Any]
"""An entry of its ``status.trials``."""

_STYLES: Final = {"Complete": "green", "Failed": "red", "Stalled": "red", "Suspended": "dim", "Running": "cyan"}
_STATE_STYLES: Final = {"Complete": "green", "Failed": "red", "Pruned": "dim", "Running": "cyan"}
_SHOWN: Final = (("Stalled", "True"), ("Failed", "True"), ("Complete", "True"), ("Suspended", "True"))


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


def table(sweep: Sweep, now: float) -> RenderableType:
    """How a sweep is, and one row for each of its trials.

    Args:
        sweep: The sweep as the API server returns it.
        now: Unix time in seconds.
    """
    conditions = [each for each in conditions_of(sweep) if (each["type"], each["status"]) in _SHOWN]
    details = details_grid(sweep, _STYLES, _rows(sweep), conditions, now)
    trials = sorted_trials(sweep)
    return Group(details, Text(""), _trials_grid(sweep, trials)) if trials else details


def _rows(sweep: Sweep) -> Iterator[tuple[str, RenderableType]]:
    status = status_of(sweep)
    counts = {state: count for state, count in (status.get("counts") or {}).items() if count}
    yield "trials", ", ".join(f"{count} {state}" for state, count in counts.items())
    best = status.get("best")
    yield "best", f"{best['name']}: {metric_of(sweep)} {shown_value(float(best['value']))}" if best else ""
    yield "model", (best or {}).get("output") or ""
    yield "GPU hours", f"{status['gpuHours']:.2f}" if status.get("gpuHours") else ""


def _trials_grid(sweep: Sweep, trials: Sequence[Trial]) -> Table:
    names = short_names(paths_of(trials))
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("trial", "state", metric_of(sweep), "step", *names.values(), "GPU time", "message"):
        grid.add_column(column if column in names.values() else column.upper(), no_wrap=True)
    for trial in trials:
        state, parameters = str(trial.get("state") or ""), trial.get("parameters") or {}
        value = trial.get("value")
        grid.add_row(
            trial["name"],
            Text(state, _STATE_STYLES.get(state, "")),
            shown_value(None if value is None else float(value)) or "-",
            last_step(trial) or "-",
            *(shown_value(parameters.get(path)) for path in names),
            duration(trial["gpuSeconds"]) if trial.get("gpuSeconds") else "-",
            trial.get("message") or "",
        )
    return grid
