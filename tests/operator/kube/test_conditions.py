"""Conditions by the rules of `metav1.Condition`."""

from __future__ import annotations

import re

import pytest

from spotune.job import Condition
from spotune_operator.kube.conditions import ORDER, Finding, find, is_true, since, updated
from spotune_operator.kube.timestamps import rfc3339, unix_time

NOW = 1_800_000_000.0


def told(*findings: Finding, before: list[Condition] | None = None, now: float = NOW) -> list[Condition]:
    return updated(before or [], findings, 3, now)


def test_transition_time_is_that_of_the_status_alone() -> None:
    first = told(Finding("Ready", "False", "Starting", "one"))
    second = told(Finding("Ready", "False", "Waiting", "two"), before=first, now=NOW + 60)
    assert (second[0].reason, second[0].message) == ("Waiting", "two")
    assert second[0].last_transition_time == first[0].last_transition_time == rfc3339(NOW)
    third = told(Finding("Ready", "True", "Waiting", "two"), before=second, now=NOW + 90)
    assert third[0].last_transition_time == rfc3339(NOW + 90)
    assert since(third, "Ready") == NOW + 90


def test_what_nothing_was_found_about_stays() -> None:
    before = told(Finding("Training", "True", "Training"))
    after = told(Finding("Ready", "True", "Training"), before=before, now=NOW + 60)
    assert find(after, "Training") == before[0]
    assert find(after, "Complete") is None
    assert not is_true(after, "Complete")
    assert since(after, "Complete") is None


def test_order_is_always_the_same_and_others_conditions_stay_last() -> None:
    theirs = told(Finding("ZebraOfSomebodyElse", "True", "Zebra"))
    found = told(*(Finding(name, "True", "Told") for name in reversed(ORDER)), before=theirs)
    assert [condition.type for condition in found] == [*ORDER, "ZebraOfSomebodyElse"]


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
def test_reason_is_one_word_wherever_it_comes_from(given: str, kept: str) -> None:
    (condition,) = told(Finding("Stalled", "True", given))
    assert condition.reason == kept
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", condition.reason), "what Kubernetes asks for"


def test_message_is_no_longer_than_kubernetes_allows() -> None:
    (condition,) = told(Finding("Stalled", "True", "Refused", "x" * 100_000))
    assert len(condition.message) == 32768


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01T00:00:00Z", "-", None, ""])
def test_a_time_that_is_none_is_none(text: str | None) -> None:
    assert unix_time(text) is None


def test_times_come_back_as_they_were_written() -> None:
    assert rfc3339(NOW) == "2027-01-15T08:00:00Z"
    assert unix_time(rfc3339(NOW)) == NOW
    assert unix_time("2027-01-15T08:00:00.250000Z") == NOW + 0.25
