"""The page of `spotune fleet --output html`: one HTML file without scripts or other resources."""

from __future__ import annotations

from html import escape
from typing import Final

from spotune.units.timestamps import rfc3339
from spotune_client.fleet.summary import COLUMNS, Fleet, Usage, cells

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1d2330;
  background: #fff; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.total { font-weight: 600; }
.bar { display: flex; height: 1.1rem; margin: .2rem 0; background: #eee; }
.bar span { display: block; height: 100%; }
.productive { background: #2b8a57; } .wasted { background: #d1602b; } .unknown { background: #99a; }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em;
  background: inherit; }
small { color: #667; }
@media (prefers-color-scheme: dark) { body { color: #dfe3ea; background: #14171d; }
  th, td { border-color: #333a45; } .bar { background: #252a33; } }
"""


def page(fleet: Fleet, scope: str, now: float) -> str:
    """The page about all teams.

    Args:
        fleet: The usage by team.
        scope: Which jobs were counted, for the heading.
        now: Unix time in seconds.
    """
    head = "".join(f"<th>{escape(title)}</th>" for title in COLUMNS)
    rows = "".join(_row(cells(usage)) for usage in fleet.teams) + _row(cells(fleet.total, "all"), ' class="total"')
    most = max((usage.gpu_hours for usage in fleet.teams), default=0.0)
    bars = "".join(_bar(usage, most) for usage in fleet.teams if usage.gpu_hours)
    note = f"<p>{escape(fleet.note)}.</p>" if fleet.note else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>spotune fleet</title><style>{_STYLE}</style>'
        f"<h1>Fleet</h1><p>FinetuneJobs of {escape(scope)}, as of {rfc3339(now)}.</p>{note}"
        f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
        "<h2>GPU hours by team</h2>"
        f"<p>Green: in steps that count. Orange: outside of them, at most. Grey: not known.</p>{bars}"
        "<p><small>Waste is GPU hours x (1 - goodput). Goodput is a share of the wall clock: while a job waits for "
        "workers it has fewer GPUs, so the waste is lower. "
        "Deleted jobs and ModelServices are not counted.</small></p></html>\n"
    )


def _row(values: list[str], kind: str = "") -> str:
    return f"<tr{kind}>" + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>"


def _bar(usage: Usage, most: float) -> str:
    """The GPU hours of a team; the longest bar has the whole width."""
    parts = {
        "productive": usage.productive_hours,
        "wasted": usage.measured_hours - usage.productive_hours,
        "unknown": usage.gpu_hours - usage.measured_hours,
    }
    spans = "".join(
        f'<span class="{name}" style="width:{100 * hours / most:.2f}%" title="{hours:,.1f} h"></span>'
        for name, hours in parts.items()
        if hours > 0
    )
    return f'<div>{escape(usage.team)}: {usage.gpu_hours:,.1f} h<div class="bar">{spans}</div></div>'
