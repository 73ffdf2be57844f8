"""The page of `spotune sweep --report`: one HTML file with a table and a chart, without scripts or other resources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from spotune.formatting import duration
from spotune.units.timestamps import rfc3339
from spotune_client.cluster.jobs import conditions_of, phase, status_of
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

_WIDTH: Final = 900
_HEIGHT: Final = 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 10, 30
_COLOURS: Final = 8
_PROBLEMS: Final = ("Failed", "Stalled")
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1d2330;
  background: #fff; }
h1 small { color: #667; font-weight: normal; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid #ddd; white-space: nowrap; }
td.message { white-space: normal; min-width: 16rem; }
tr.best { font-weight: 600; }
svg { width: 100%; height: auto; }
svg text { fill: #667; font-size: 12px; }
.grid { stroke: #ddd; }
polyline { fill: none; stroke-width: 2; stroke: var(--c); }
polyline.Pruned, polyline.Failed { stroke-dasharray: 5 4; opacity: .7; }
circle { fill: var(--c); }
.key { margin-right: 1rem; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .3em;
  background: var(--c); }
.c0 { --c: #3566cc; } .c1 { --c: #d1602b; } .c2 { --c: #2b8a57; } .c3 { --c: #a03db0; }
.c4 { --c: #b08a10; } .c5 { --c: #1a8f9c; } .c6 { --c: #c23b5a; } .c7 { --c: #667085; }
@media (prefers-color-scheme: dark) { body { color: #dfe3ea; background: #14171d; }
  th, td { border-color: #333a45; } .grid { stroke: #333a45; } }
"""


def page(sweep: Sweep, now: float) -> str:
    """The page about a sweep.

    Args:
        sweep: The sweep as the API server returns it.
        now: Unix time in seconds.
    """
    name, trials = escape(sweep["metadata"]["name"]), sorted_trials(sweep)
    shown = [each for each in conditions_of(sweep) if each["type"] in _PROBLEMS and each["status"] == "True"]
    problems = "".join(f"<p><strong>{escape(each.get('message') or '')}</strong></p>" for each in shown[:1])
    hours = status_of(sweep).get("gpuHours") or 0
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"<h1>{name} <small>{escape(phase(sweep))}</small></h1>{problems}"
        f"<p>{len(trials)} trials, {hours:.2f} GPU hours, as of {rfc3339(now)}.</p>"
        f"{_chart(sweep, trials)}<h2>Trials</h2>{_table(sweep, trials)}</html>\n"
    )


def _table(sweep: Sweep, trials: Sequence[Trial]) -> str:
    names = short_names(paths_of(trials))
    titles = ("trial", "state", metric_of(sweep), "step", *names.values(), "GPU time", "model", "")
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    best = (status_of(sweep).get("best") or {}).get("number")
    rows = []
    for trial in trials:
        value, parameters = trial.get("value"), trial.get("parameters") or {}
        cells = [
            trial["name"],
            trial.get("state") or "",
            shown_value(None if value is None else float(value)),
            last_step(trial),
            *(shown_value(parameters.get(path)) for path in names),
            duration(trial["gpuSeconds"]) if trial.get("gpuSeconds") else "",
            trial.get("output") or "",
        ]
        kind = ' class="best"' if trial["number"] == best else ""
        content = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr{kind}>{content}<td class="message">{escape(trial.get("message") or "")}</td></tr>')
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _chart(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """The objective over the steps of each trial; empty without an evaluation."""
    lines = {trial["name"]: _points(trial) for trial in trials}
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [_tick(place(left, y)[1], y) for y in (low, (low + high) / 2, high)]
    drawn += [
        f'<text x="{place(x, low)[0]:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">step {x:g}</text>'
        for x in sorted({left, right})
    ]
    keys = []
    for number, trial in enumerate(trials):
        line = [place(x, y) for x, y in lines[trial["name"]]]
        if line:
            drawn += _line(line, f"c{number % _COLOURS}", str(trial.get("state") or ""), trial["name"])
            keys.append(f'<span class="key c{number % _COLOURS}">{escape(trial["name"])}</span>')
    title = f"<h2>{escape(metric_of(sweep))} over steps</h2>"
    return f'{title}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(drawn)}</svg><p>{"".join(keys)}</p>'


def _points(trial: Trial) -> list[tuple[float, float]]:
    return [(float(each["step"]), float(each["value"])) for each in trial.get("evaluations") or ()]


def _tick(y: float, value: float) -> str:
    line = f'<path class="grid" d="M{_LEFT},{y:.1f} H{_WIDTH - _RIGHT}"/>'
    return f'{line}<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'


def _line(line: Sequence[tuple[float, float]], colour: str, state: str, name: str) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
    title = f"<title>{escape(name)}</title>"
    yield f'<polyline class="{colour} {escape(state)}" points="{path}">{title}</polyline>'
    for x, y in line:
        yield f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">{title}</circle>'
