"""Progress of a long command in a terminal and in logs."""

from __future__ import annotations

import io

from rich.console import Console

from spotune_trainer.cli.byte_progress import byte_progress


def test_a_log_gets_a_line_for_each_tenth() -> None:
    out = io.StringIO()
    with byte_progress("Converting", Console(file=out)) as report:
        for done in range(0, 2001, 50):
            report(done, 2000)
    assert out.getvalue().splitlines() == [f"Converting: {tenth * 10} % of 2.0 kB" for tenth in range(1, 11)]


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    with byte_progress("Converting", Console(file=out, force_terminal=True, width=80)) as report:
        report(2000, 2000)
    assert "Converting" in out.getvalue()
    assert "2.0/2.0 kB" in out.getvalue()
