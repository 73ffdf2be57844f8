"""Conditions by the rules of `metav1.Condition`."""

from __future__ import annotations

import re

import pytest

from spotune.custom_resource import Condition
from spotune.units.timestamps import rfc3339, unix_time
from spotune_operator.kube.conditions import (
    ORDER,
    Finding,
    find,
    is_true,
    reference,
    referenced,
    since,
    updated,
    with_cause,
)

NOW = 1_800_000_000.0


def after_findings(*findings: Finding, before: list[Condition] | None = None, now: float = NOW) -> list[Condition]:
    return updated(before or [], findings, 3, now)


def test_transition_time_changes_with_the_status_only() -> None:
    first = after_findings(Finding("Ready", "False", "Starting", "one"))
    second = after_findings(Finding("Ready", "False", "Waiting", "two"), before=first, now=NOW + 60)
    assert (second[0].reason, second[0].message) == ("Waiting", "two")
    assert second[0].last_transition_time == first[0].last_transition_time == rfc3339(NOW)
    third = after_findings(Finding("Ready", "True", "Waiting", "two"), before=second, now=NOW + 90)
    assert third[0].last_transition_time == rfc3339(NOW + 90)
    assert since(third, "Ready") == NOW + 90


def test_condition_without_a_finding_stays() -> None:
    before = after_findings(Finding("Training", "True", "Training"))
    after = after_findings(Finding("Ready", "True", "Training"), before=before, now=NOW + 60)
    assert find(after, "Training") == before[0]
    assert find(after, "Complete") is None
    assert not is_true(after, "Complete")
    assert since(after, "Complete") is None


def test_order_is_fixed_and_foreign_conditions_come_last() -> None:
    theirs = after_findings(Finding("ZebraOfAnotherOperator", "True", "Zebra"))
    found = after_findings(*(Finding(name, "True", "Reported") for name in reversed(ORDER)), before=theirs)
    assert [condition.type for condition in found] == [*ORDER, "ZebraOfAnotherOperator"]


def test_a_reference_is_replaced_by_the_cause_that_it_refers_to() -> None:
    message = f"a check failed; {reference('PreflightPassed')}"
    assert referenced(message) == "PreflightPassed"
    assert with_cause(message, "model: no such file") == "a check failed; model: no such file"
    assert with_cause(message, None) == message
    assert referenced("see condition Ready, which is false") == ""
    assert with_cause("no such image", "model: no such file") == "no such image"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("ErrImagePull", "ErrImagePull"),
        ("UnexpectedAdmissionError: GPU is gone", "UnexpectedAdmissionErrorGPUisgone"),
        ("", "Reason"),
        ("409", "Reason409"),
        ("_x", "Reason_x"),
        ("Ünfit", "nfit"),
        ("A" * 5000, "A" * 1024),
    ],
)
def test_reason_becomes_a_valid_word(given: str, kept: str) -> None:
    (condition,) = after_findings(Finding("Stalled", "True", given))
    assert condition.reason == kept
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", condition.reason), "the pattern of metav1.Condition"


def test_message_is_limited_to_kubernetes_maximum() -> None:
    (condition,) = after_findings(Finding("Stalled", "True", "Refused", "x" * 100_000))
    assert len(condition.message) == 32768


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01T00:00:00Z", "-", None, ""])
def test_invalid_time_is_none(text: str | None) -> None:
    assert unix_time(text) is None


def test_times_round_trip() -> None:
    assert rfc3339(NOW) == "2027-01-15T08:00:00Z"
    assert unix_time(rfc3339(NOW)) == NOW
    assert unix_time("2027-01-15T08:00:00.250000Z") == NOW + 0.25
