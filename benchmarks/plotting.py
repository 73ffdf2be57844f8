"""Plots as SVG text, the same for the same measurements on any machine."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "spotune",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_DECIMALS = re.compile(r"-?\d+\.\d{3,}")
"""Coordinates with many decimal places. The last digits are invisible, and differ between processors."""
_HASHED_ID = re.compile(r"\b[pm][0-9a-f]{10}\b")
"""Ids of clip paths and markers. Matplotlib hashes them from coordinates, whose last bits depend on the processor."""
_WITHOUT_METADATA = {"Date": None, "Creator": None}


def svg(draw: Callable[[Figure], None], inches: tuple[float, float]) -> str:
    """What `draw` draws on a figure of this size, as an SVG."""
    with mpl.rc_context():
        mpl.rcdefaults()  # ignore the user's settings
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=_WITHOUT_METADATA)
    rounded = _DECIMALS.sub(lambda number: f"{float(number[0]):.2f}", text.getvalue())
    ids = {found: f"shape-{number}" for number, found in enumerate(dict.fromkeys(_HASHED_ID.findall(rounded)))}
    named = _HASHED_ID.sub(lambda found: ids[found[0]], rounded)
    return "\n".join(line.rstrip() for line in named.splitlines()) + "\n"
