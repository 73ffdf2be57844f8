"""The result of a check, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class Verdict(StrEnum):
    """Result of a check."""

    PASSED = "passed"
    WARNING = "warning"
    """It may work, or cannot be determined."""
    FAILED = "failed"
    """Jobs, services or commands will not work."""


_STYLES: Final = {Verdict.PASSED: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red"}
_NAME_WIDTH: Final = 16
_VERDICT_WIDTH: Final = 7


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: Name of the check.
        verdict: Its result.
        message: What was found.
        remedy: How to fix it; empty if there is nothing to fix.
    """

    name: str
    verdict: Verdict
    message: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """The result for ``--output json``."""
        return {"name": self.name, "verdict": self.verdict.value, "message": self.message, "remedy": self.remedy}


@dataclass(frozen=True)
class Forbidden:
    """Stands in for objects that the user may not list."""

    reason: str


def passed(name: str, message: str) -> Check:
    """A check that found no problem."""
    return Check(name, Verdict.PASSED, message)


def warning(name: str, message: str, remedy: str = "") -> Check:
    """A check that found a possible problem."""
    return Check(name, Verdict.WARNING, message, remedy)


def failed(name: str, message: str, remedy: str) -> Check:
    """A check that found a problem."""
    return Check(name, Verdict.FAILED, message, remedy)


def plain_text(check: Check) -> str:
    """The check as plain text, without wrapping."""
    first = f"{check.verdict.value:<{_VERDICT_WIDTH}}  {check.name:<{_NAME_WIDTH}}  {check.message}"
    return first + (f"\n{' ' * (_VERDICT_WIDTH + _NAME_WIDTH + 4)}-> {check.remedy}" if check.remedy else "")


def render(check: Check) -> RenderableType:
    """The check for a terminal: one line, and one more for the remedy."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_VERDICT_WIDTH, style=_STYLES[check.verdict])
    grid.add_column(width=_NAME_WIDTH)
    grid.add_column(overflow="fold")
    grid.add_row(check.verdict.value, check.name, Text(check.message))
    if check.remedy:
        grid.add_row("", "", Text(f"-> {check.remedy}", "cyan"))
    return grid
