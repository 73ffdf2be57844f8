"""The runbook has every reason that the operator gives, every Event and every alert."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from charts.generate import CHART
from spotune_operator.errors import StalledError
from spotune_operator.reconcile import condition_findings as findings
from spotune_operator.reconcile import events as job_events

RUNBOOK = (Path(__file__).parent.parent.parent / "docs/runbook.md").read_text()
GOOD = {"NothingToMend", "NotFailed", "NotSuspended", "Complete", "Progressing"}
"""What is no trouble, and what a reason that is looked up elsewhere repeats."""


def reasons() -> Iterator[str]:
    """Of conditions that are not as one would like them, where the code spells them out."""
    for node in ast.walk(ast.parse(Path(findings.__file__).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            texts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in node.args]
            if node.func.id == "Trouble":
                yield texts[0]
            elif node.func.id == "Finding" and (texts[1] != "True" or texts[0] in ("Stalled", "Failed")):
                yield texts[2]
    yield from findings._USERS_TO_MEND
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
