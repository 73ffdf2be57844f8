"""What a check found, and how it looks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    WARNING = "warning"
    """It may do, or cannot be seen."""
    FAILED = "failed"
    """Jobs, or commands, will not work."""


_STYLES: Final = {Verdict.PASSED: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red"}
_NAME_WIDTH: Final = 16
_VERDICT_WIDTH: Final = 7


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was looked at.
        verdict: How it ended.
        message: What was found, a sentence.
        remedy: What to do about it; empty where nothing has to be done.
    """

    name: str
    verdict: Verdict
    message: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """For ``--output json``."""
        return {"name": self.name, "verdict": self.verdict.value, "message": self.message, "remedy": self.remedy}


@dataclass(frozen=True)
class Hidden:
    """What the user may not see, in place of what was looked for."""

    reason: str


def passed(name: str, message: str) -> Check:
    """A check that found all as it should be."""
    return Check(name, Verdict.PASSED, message)


def warning(name: str, message: str, remedy: str = "") -> Check:
    """A check that leaves a doubt."""
    return Check(name, Verdict.WARNING, message, remedy)


def failed(name: str, message: str, remedy: str) -> Check:
    """A check that found something missing."""
    return Check(name, Verdict.FAILED, message, remedy)


def plain(check: Check) -> str:
    """The same without colours, and however long the lines get."""
    first = f"{check.verdict.value:<{_VERDICT_WIDTH}}  {check.name:<{_NAME_WIDTH}}  {check.message}"
    return first + (f"\n{' ' * (_VERDICT_WIDTH + _NAME_WIDTH + 4)}-> {check.remedy}" if check.remedy else "")


def line(check: Check) -> RenderableType:
    """A check as a line, and a second one with what to do."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_VERDICT_WIDTH, style=_STYLES[check.verdict])
    grid.add_column(width=_NAME_WIDTH)
    grid.add_column(overflow="fold")
    grid.add_row(check.verdict.value, check.name, Text(check.message))
    if check.remedy:
        grid.add_row("", "", Text(f"-> {check.remedy}", "cyan"))
    return grid
