"""SVG charts for the report page: lines over steps, worker groups over time, a bar of parts, and lengths of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 28
_TICKS = 5
_MAX_POINTS = 1000
"""More than a chart has pixels. Longer lines are thinned to the extremes of each group of points."""


@dataclass(frozen=True)
class Line:
    """A line in a chart.

    Attributes:
        name: For the legend.
        points: (x, y), ascending by x.
        dotted: Whether each point is drawn as a dot, too.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dotted: bool = False


def line_chart(title: str, lines: Sequence[Line]) -> str:
    """A chart of lines over steps; an empty string if there are no points."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points if math.isfinite(y)]
    if not ys:
        return ""
    across, up = Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT), Axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(up), *(_tick(across.at(tick), f"{tick:,.6g}") for tick in across.ticks())]
    for number, line in enumerate(drawn):
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in thinned(line.points) if math.isfinite(y))
        parts.append(f'<polyline class="line c{number}" points="{path}"/>')
        if line.dotted:
            parts += [
                f'<circle class="dot c{number}" cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3"/>'
                for x, y in line.points
            ]
    legend = "".join(f'<span class="key c{number}">{escape(line.name)}</span>' for number, line in enumerate(drawn))
    return _figure(title, legend if len(drawn) > 1 else "", HEIGHT, "".join(parts))


@dataclass(frozen=True)
class Bar:
    """An interval on a timeline.

    Attributes:
        start: Unix time.
        end: Unix time.
        height: From 0 to 1.
        kind: Its CSS class.
        label: Shown on hover.
    """

    start: float
    end: float
    height: float
    kind: str
    label: str


def timeline(title: str, bars: Sequence[Bar], moments: Sequence[float], legend: Mapping[str, str]) -> str:
    """Bars over time, with a tick below them for each of the moments (Unix time)."""
    if not bars:
        return ""
    begin, end = min(bar.start for bar in bars), max(*(bar.end for bar in bars), *moments, 0.0)
    seconds = max(end - begin, 1.0)
    across = Axis(0.0, seconds, _LEFT, 2 * WIDTH - _RIGHT)
    top, base = _TOP, 96
    drawn = []
    for bar in bars:
        x, right = across.at(bar.start - begin), across.at(bar.end - begin)
        height = max((base - top) * bar.height, 2)
        place = f'x="{x:.1f}" y="{base - height:.1f}" width="{max(right - x, 1.5):.1f}" height="{height:.1f}"'
        drawn.append(f'<rect class="bar {bar.kind}" {place}><title>{escape(bar.label)}</title></rect>')
    drawn += [
        f'<path class="moment" d="M{across.at(moment - begin):.1f},{base + 2} v6"/>'
        for moment in moments
        if begin <= moment <= end
    ]
    for tick in across.ticks():
        place = f"{across.at(tick):.1f}"
        drawn.append(
            f'<text class="tick" x="{place}" y="{base + 22}" text-anchor="middle">{escape(duration(tick))}</text>'
        )
    keys = "".join(f'<span class="key {kind}">{escape(name)}</span>' for kind, name in legend.items())
    return _figure(title, keys, 126, "".join(drawn), width=2 * WIDTH)


def parts_bar(title: str, parts: Mapping[str, float]) -> str:
    """One bar divided into the parts that are not zero; the legend shows each share."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    shown = {name: seconds for name, seconds in parts.items() if seconds > 0}
    x, drawn, keys = 0.0, [], []
    for number, (name, seconds) in enumerate(shown.items()):
        width = 2 * WIDTH * seconds / total
        label = f"{name} {seconds / total:.1%}, {duration(seconds)}"
        place = f'x="{x:.1f}" y="0" width="{width:.1f}" height="28"'
        drawn.append(f'<rect class="bar c{number}" {place}><title>{escape(label)}</title></rect>')
        keys.append(f'<span class="key c{number}">{escape(label)}</span>')
        x += width
    return _figure(title, "".join(keys), 28, "".join(drawn), width=2 * WIDTH)


def length_chart(title: str, rows: Mapping[int, int], limit: int | None) -> str:
    """A bar for each power of two of the length in tokens, on a logarithmic axis, and a line at the maximum length.

    Args:
        title: Above the chart.
        rows: Number of rows by the upper bound of their length, a power of two.
        limit: The maximum length; None if nothing is cut.
    """
    if not rows:
        return ""
    low, high = math.log2(min(rows)) - 1, math.log2(max(rows))
    if limit is not None:
        low, high = min(low, math.floor(math.log2(limit))), max(high, math.ceil(math.log2(limit)))
    across, up = Axis(low, high, _LEFT, WIDTH - 2 * _RIGHT), Axis(0, max(rows.values()), HEIGHT - _BOTTOM, _TOP)
    drawn = [_grid(up)]
    for bound, count in sorted(rows.items()):
        left, right, top = across.at(math.log2(bound) - 1), across.at(math.log2(bound)), up.at(count)
        label = f"{bound // 2 + 1:,} to {bound:,} tokens: {count:,} rows, {count / sum(rows.values()):.1%}"
        place = f'x="{left + 1:.1f}" y="{top:.1f}" width="{right - left - 2:.1f}" height="{up.first - top:.1f}"'
        drawn.append(f'<rect class="bar c0" {place}><title>{escape(label)}</title></rect>')
    powers = range(max(math.ceil(low), 0), math.floor(high) + 1)
    drawn += [_tick(across.at(power), f"{2**power:,}") for power in powers]
    if limit is not None:
        drawn.append(f'<path class="limit" d="M{across.at(math.log2(limit)):.1f},{_TOP} V{HEIGHT - _BOTTOM}"/>')
    return _figure(title, "", HEIGHT, "".join(drawn))


@dataclass(frozen=True)
class Axis:
    """A linear scale from values [low, high] to pixels [first, last]."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        """The pixel position of a value."""
        span = self.high - self.low
        return self.first + (self.last - self.first) * ((value - self.low) / span if span else 0.5)

    def ticks(self) -> list[float]:
        """Round values within [low, high]: multiples of 1, 2 or 5 times a power of ten."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        raw = span / _TICKS
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MAX_POINTS` points: the lowest and the highest of each group, so spikes remain visible."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        extremes = {min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def duration(seconds: float) -> str:
    """A duration in its two largest units, such as `1 h 05 min`."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole % 60:02} s" if minutes else f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _grid(up: Axis) -> str:
    """Horizontal lines with the values of the vertical axis."""
    lines = []
    for tick in up.ticks():
        y = f"{up.at(tick):.1f}"
        lines.append(f'<path class="grid" d="M{_LEFT},{y} H{WIDTH - _RIGHT}"/>')
        lines.append(f'<text class="tick" x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{tick:.6g}</text>')
    return "".join(lines)


def _tick(x: float, text: str) -> str:
    """A value below the horizontal axis."""
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>'


def _figure(title: str, legend: str, height: int, content: str, width: int = WIDTH) -> str:
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{content}</svg>'
    caption = f'<figcaption>{escape(title)}<span class="legend">{legend}</span></figcaption>'
    return f'<figure class="{"wide" if width > WIDTH else ""}">{caption}{svg}</figure>'
