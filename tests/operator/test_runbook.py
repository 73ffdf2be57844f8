"""The runbook has every reason of a condition, every Event and every alert."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from charts.generate import CHART
from spotune_operator.errors import StalledError
from spotune_operator.reconcile import condition_findings, job_serving, kstatus
from spotune_operator.reconcile import events as job_events
from tests import ROOT

RUNBOOK = (ROOT / "docs/runbook.md").read_text()
GOOD = {"NothingToMend", "NotFailed", "NotSuspended", "Complete", "Progressing"}
"""Reasons that need no entry: nothing is wrong, or they repeat a reason that has one."""


def reasons() -> Iterator[str]:
    """Literal reasons of unhealthy conditions in the code."""
    nodes = [
        node
        for module in (condition_findings, job_serving, kstatus)
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
    ]
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            texts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in node.args]
            if node.func.id == "PodProblem":
                yield texts[0]
            elif node.func.id == "Finding" and (texts[1] != "True" or texts[0] in ("Stalled", "Failed")):
                yield texts[2]
    yield from kstatus.NEED_A_USER
    kinds: list[type[StalledError]] = [StalledError, *StalledError.__subclasses__()]
    yield from (kind.reason for kind in kinds)


@pytest.mark.parametrize("reason", sorted({*reasons()} - GOOD - {""}))
def test_reason_is_in_the_runbook(reason: str) -> None:
    assert f"`{reason}`" in RUNBOOK


def test_reasons_are_found() -> None:
    assert {"CommitFails", "SupervisorUnreachable", "HeadPending", "UnfitStorageClass", "JobError"} <= {*reasons()}


@pytest.mark.parametrize("words", job_events._CAUSES.values())
def test_cause_of_a_restart_is_in_the_runbook(words: str) -> None:
    assert f"| {words} |" in RUNBOOK


@pytest.mark.parametrize("alert", re.findall(r"alert: (\w+)", (CHART / "templates/rules.yaml").read_text()))
def test_alert_is_in_the_runbook(alert: str) -> None:
    assert f"| `{alert}` |" in RUNBOOK
