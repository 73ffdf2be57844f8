"""`spotune sweep` in the terminal: how a sweep is, and a table of its trials, the best first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotune.formatting import duration
from spotune_client.cluster.jobs import conditions_of, status_of
from spotune_client.sweeps.trials import (
    Sweep,
    Trial,
    last_step,
    metric_of,
    paths_of,
    short_names,
    shown_value,
    sorted_trials,
)
from spotune_operator.cli.status import details_grid

_STYLES: Final = {"Complete": "green", "Failed": "red", "Stalled": "red", "Suspended": "dim", "Running": "cyan"}
_STATE_STYLES: Final = {"Complete": "green", "Failed": "red", "Pruned": "dim", "Running": "cyan"}
_SHOWN: Final = (("Stalled", "True"), ("Failed", "True"), ("Complete", "True"), ("Suspended", "True"))


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
