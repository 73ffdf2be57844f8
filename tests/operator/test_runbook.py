"""The runbook has every reason of a condition, every Event and every alert."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from charts.generate import CHART
from spotune.deadline.terms import Outlook
from spotune_operator.errors import StalledError
from spotune_operator.reconcile import condition_findings, job_serving, kstatus
from spotune_operator.reconcile import events as job_events
from spotune_operator.reconcile.limits import cost
from tests import ROOT

RUNBOOK = (ROOT / "docs/runbook.md").read_text()
GOOD = {"NothingToMend", "NotFailed", "NotSuspended", "Complete", "Progressing", "InTime", "WithinLimit"}
"""Reasons that need no entry: nothing is wrong, or they repeat a reason that has one."""


def calls(*modules: ModuleType) -> Iterator[tuple[str, list[str]]]:
    """Yields each call of a function by name in the modules, with its arguments; other ones than literals are empty."""
    for module in modules:
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield node.func.id, [str(part.value) if isinstance(part, ast.Constant) else "" for part in node.args]


def reasons() -> Iterator[str]:
    """Literal reasons of unhealthy conditions in the code."""
    for name, texts in calls(condition_findings, job_serving, kstatus):
        if name == "PodProblem":
            yield texts[0]
        elif name == "Finding" and (texts[1] != "True" or texts[0] in ("Stalled", "Failed")):
            yield texts[2]
    yield from (texts[2] for name, texts in calls(cost) if name == "Finding")
    yield from Outlook
    yield from kstatus.NEED_A_USER
    kinds: list[type[StalledError]] = [StalledError, *StalledError.__subclasses__()]
    yield from (kind.reason for kind in kinds)


@pytest.mark.parametrize("reason", sorted({*reasons()} - GOOD - {""}))
def test_reason_is_in_the_runbook(reason: str) -> None:
    assert f"`{reason}`" in RUNBOOK


def test_reasons_are_found() -> None:
    assert {
        "TooLate",
        "Spent",
        "CommitFails",
        "SupervisorUnreachable",
        "HeadPending",
        "UnfitStorageClass",
        "JobError",
    } <= {*reasons()}


@pytest.mark.parametrize("words", job_events._CAUSES.values())
def test_cause_of_a_restart_is_in_the_runbook(words: str) -> None:
    assert f"| {words} |" in RUNBOOK


@pytest.mark.parametrize("alert", re.findall(r"alert: (\w+)", (CHART / "templates/rules.yaml").read_text()))
def test_alert_is_in_the_runbook(alert: str) -> None:
    assert f"| `{alert}` |" in RUNBOOK
