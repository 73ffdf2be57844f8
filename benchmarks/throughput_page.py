"""Tables and plots of docs/benchmarks.md, of what was measured: each table between two comments, each plot an SVG.

python -m benchmarks.throughput_page
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.throughput_plots import PLOTS
from benchmarks.throughput_tables import TABLES

_DOCS = Path(__file__).parents[1] / "docs"


def files() -> dict[Path, str]:
    """The page and its plots as they have to be, by path."""
    page = _DOCS / "benchmarks.md"
    plots = {_DOCS / "images" / f"{name}.svg": plot() for name, plot in PLOTS.items()}
    return {page: fill(page.read_text(encoding="utf-8")), **plots}


def fill(page: str) -> str:
    """The page with all tables as they have to be.

    Raises:
        ValueError: one of them has no place in it.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: written by benchmarks/throughput_page.py -->", f"<!-- {name}: end -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"the page has no place for {name}: {begin} ... {end}")
        page = before + "\n".join((begin, "", *table.lines(), "", end)) + after
    return page


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
