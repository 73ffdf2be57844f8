"""Simulated scenarios as a rich table: one row each, with goodput, lost time by part, cost and finishing time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spotune.formatting import duration
from spotune.goodput import Part
from spotune.simulate.compare import ScenarioResult
from spotune.simulate.terms import NEVER, Timings

_ABSENT = "-"
_PARTS = {
    "Lost": Part.LOST,
    "Start-up": Part.STARTUP,
    "Restore": Part.RESTORE,
    "Stall": Part.CHECKPOINT_STALL,
    "Data": Part.DATA_WAIT,
    "Waiting": Part.WAITING,
}


def print_comparison(results: Sequence[ScenarioResult], times: Timings, console: Console) -> None:
    """Print one row per scenario, and the timings that were assumed."""
    table = Table(title="Percentages are of the wall clock", title_justify="left", title_style="dim")
    for name in ("Workers", "Checkpoint", "Head", "Capacity"):
        table.add_column(name)
    for name in ("Goodput", *_PARTS, "Steps", "Restarts", "Cost", "Finished after"):
        table.add_column(name, justify="right")
    for row in results:
        scenario = row.scenario
        table.add_row(
            f"{scenario.min_workers}-{scenario.workers}"
            if scenario.min_workers != scenario.workers
            else str(scenario.workers),
            _checkpoint_every(scenario.checkpoint_every),
            scenario.head,
            scenario.capacity,
            f"[bold]{row.goodput:.1%}[/bold]",
            *(f"{row.share(part):.1%}" for part in _PARTS.values()),
            f"{row.steps:,.0f}",
            f"{row.restarts:.1f}".removesuffix(".0"),
            f"{row.cost:,.2f}" if row.cost is not None else _ABSENT,
            duration(row.seconds) if row.finished else "not" if row.target_steps else _ABSENT,
        )
    console.print(table)
    console.print(Text(_assumptions(times), style="dim"))


def _checkpoint_every(checkpoint: str | float | int) -> str:
    """The checkpoint interval in the format of `checkpoint.every`."""
    if isinstance(checkpoint, float):
        return f"{checkpoint:g} s"
    return checkpoint if isinstance(checkpoint, str) else f"{checkpoint} steps"


def _assumptions(times: Timings) -> str:
    steps = ", ".join(f"{seconds:.3g} s with {workers}" for workers, seconds in sorted(times.step.items()))
    others = {
        "start-up": times.start_up,
        "first start-up": times.start_up if times.first_start_up is None else times.first_start_up,
        "start of a node": times.join,
        "restore": times.restore,
        "stall": times.stall,
        "commit": times.commit,
        "detection": times.detection,
        "loss of a head": times.head_loss,
        "start of a driver": times.attempt,
    }
    listed = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in others.items() if seconds != NEVER)
    return f"Assumed timings: a step {steps} workers; {listed}."
