"""Writes the tables and plots of docs/benchmarks.md from measurements: tables between two comments, plots as SVG files.

python -m benchmarks.throughput_page
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.fp8_tables import FP8_TABLES, Lines
from benchmarks.kernel_alternatives_table import TABLES as KERNEL_TABLES
from benchmarks.large_models_tables import TABLES as LARGE_MODEL_TABLES
from benchmarks.long_rows_tables import TABLES as LONG_ROWS_TABLES
from benchmarks.step_time_tables import TABLES as STEP_TIME_TABLES
from benchmarks.throughput_plots import PLOTS
from benchmarks.throughput_tables import TABLES

_DOCS = Path(__file__).parents[1] / "docs"


def files() -> dict[Path, str]:
    """The current content of the page and its plots, by path."""
    page = _DOCS / "benchmarks.md"
    plots = {_DOCS / "images" / f"{name}.svg": plot() for name, plot in PLOTS.items()}
    return {page: fill(page.read_text(encoding="utf-8")), **plots}


def fill(page: str) -> str:
    """The page with all tables filled in.

    Raises:
        ValueError: the page has no comments for one of the tables.
    """
    tables: dict[str, Lines] = {
        **TABLES,
        **FP8_TABLES,
        **LONG_ROWS_TABLES,
        **KERNEL_TABLES,
        **LARGE_MODEL_TABLES,
        **STEP_TIME_TABLES,
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by benchmarks/throughput_page.py -->", f"<!-- {name}: end -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"the page has no comments for {name}: {begin} ... {end}")
        page = before + "\n".join((begin, "", *table.lines(), "", end)) + after
    return page


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
