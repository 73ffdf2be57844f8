"""Progress of a command over many bytes: a bar in a terminal, one line for each tenth elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def byte_progress(activity: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show progress while a block runs.

    Args:
        activity: shown beside the bar, such as `Converting`.
        console: on standard error, so that standard output has the result alone.

    Yields:
        A function to call with the bytes done and the total bytes.
    """
    if not console.is_terminal:
        yield _lines(activity, console)
        return
    with Progress(TextColumn(activity), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(activity: str, console: Console) -> Callable[[int, int], None]:
    tenths = 0

    def report(done: int, total: int) -> None:
        nonlocal tenths
        reached = 10 * done // max(total, 1)
        if reached > tenths:
            tenths = reached
            console.print(f"{activity}: {10 * reached} % of {decimal(total)}", highlight=False)

    return report
