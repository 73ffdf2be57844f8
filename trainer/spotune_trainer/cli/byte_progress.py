"""How far a command is that goes through many bytes: a bar in a terminal, a line per tenth elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def byte_progress(doing: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show progress while a block runs.

    Args:
        doing: what is being done: `Converting`.
        console: on standard error, so that output stays clean.

    Yields:
        To be called with the bytes done and those there are.
    """
    if not console.is_terminal:
        yield _lines(doing, console)
        return
    with Progress(TextColumn(doing), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(doing: str, console: Console) -> Callable[[int, int], None]:
    tenths = 0

    def report(done: int, total: int) -> None:
        nonlocal tenths
        reached = 10 * done // max(total, 1)
        if reached > tenths:
            tenths = reached
            console.print(f"{doing}: {10 * reached} % of {decimal(total)}", highlight=False)

    return report
