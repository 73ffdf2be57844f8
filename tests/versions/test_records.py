"""Records of the tests with other versions, and the page that is written from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.versions import records, runs
from tests.versions.command import PAGE
from tests.versions.records import FAST, PASSED, Record, Versions
from tests.versions.report import page

IN_A_CLUSTER = Versions("3.11.7", "2.60.0", "1.29.15", "1.29.15", "1.5.1")
FAULT = Record("head pod deleted", IN_A_CLUSTER, PASSED, 200.0, "abc", "2026-11-28", "python -m tests.versions", {})


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(records.read()), "run `python -m tests.versions page`"


def test_newest_record_of_a_test_with_the_same_versions_counts(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    for record in (
        replace(FAULT, result="AssertionError: weights differ"),
        FAULT,
        replace(FAULT, versions=replace(IN_A_CLUSTER, kubernetes="1.34.4")),
    ):
        records.append(record, path)
    assert [(each.versions.kubernetes, each.passed) for each in records.read(path)] == [
        ("1.29.15", True),
        ("1.34.4", True),
    ]


def test_page_says_what_passed_and_what_failed() -> None:
    fast = Record(FAST, Versions("3.13.0", "2.60.0"), PASSED, 1.0, "abc", "2026-11-28", "", {"passed": 5010})
    failed = replace(FAULT, test="API server restarted", result="AssertionError: a | b")
    text = page([FAULT, failed, fast])
    assert "| 3.13.0 | 2.60.0 | 5,010 passed | `abc` | 2026-11-28 |" in text
    assert "1 of 2 passed; **API server restarted**: AssertionError: a / b" in text


def test_outcomes_are_counted_and_failures_named(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    cases = ['name="a"/>', 'name="b"><failure/></testcase>', 'name="c"><skipped/></testcase>', 'name="d"/>']
    path.write_text(f"<testsuites><testsuite>{''.join(f'<testcase {case}' for case in cases)}</testsuite></testsuites>")
    assert runs._outcomes(path) == ({"passed": 2, "skipped": 1, "failed": 1}, ["b"])


def test_five_faults_are_chosen() -> None:
    assert len(runs.CHOSEN) == len(runs.FAULTS) == 5
