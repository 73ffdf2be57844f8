"""docs/chaos.md has a row for every seed and job, counts every kind of fault, and shows every finding; records stay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests import ROOT
from tests.cluster.chaos import records
from tests.cluster.chaos.command import RECORDS
from tests.cluster.chaos.injector import INJECT
from tests.cluster.chaos.records import ChaosRecord, InjectedFault, JobResult, ServiceResult
from tests.cluster.chaos.report import report
from tests.cluster.chaos.schedule import FaultKind

HIT = InjectedFault(FaultKind.RANK_KILLED, 3.0, "worker-a", 0.0, "", 0)
LASTED = InjectedFault(FaultKind.VOLUME_FULL, 9.5, "pvc-1", 7.2, "", 1)
MISSED = InjectedFault(FaultKind.GCS_KILLED, 12.0, "", 0.0, "there is no head pod on a node", 1)
JOB = JobResult(
    name="chaos-2-1",
    steps=500,
    generations=9,
    world_sizes=[2, 1, 3],
    steps_lost=61,
    restarts={"workerLost": 2, "headLost": 1},
    gap_seconds=71.4,
    recovered_seconds=12.0,
    statuses=300,
    findings=[],
)
SERVICE = ServiceResult(
    requests=1234,
    failed=0,
    other_text=0,
    refused=3,
    gap_seconds=41.5,
    recovered_seconds=8.0,
    statuses=40,
    findings=[],
)
PASSED = ChaosRecord(
    seed=2,
    num_faults=3,
    faults=[HIT, LASTED, MISSED],
    jobs=[JOB, replace(JOB, name="chaos-2-2")],
    service=SERVICE,
    problems=[],
    phases={"faults": 300.0, "recovery": 60.0},
    commit="`0123`",
    machine="On a machine.",
)
FAILED = replace(
    PASSED,
    seed=1,
    jobs=[replace(JOB, name="chaos-1-1", findings=["the loss | 5.6 is shown"]), replace(JOB, name="chaos-1-2")],
    service=replace(SERVICE, failed=2, findings=["2 of 1234 requests failed"]),
    problems=["n2 was not started"],
)


def row(page: str, first: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_seed_has_a_row() -> None:
    page = report([FAILED, PASSED])
    assert row(page, "2") == ["2", "2 of 3", "2", "1,234", "0", "0", "3", "42 s", "8 s", "6.0", "`0123`", "passed"]
    assert row(page, "1")[-1] == "**3 findings**"
    summary = " ".join(page.split())
    assert "**1 of 2 seeds passed**, with 4 faults of 2 kinds over 4 jobs; 2 of 2,468 requests failed." in summary


def test_page_without_records_claims_nothing() -> None:
    assert "No seed has been run yet." in report([])


def test_every_job_has_a_row() -> None:
    page = report([FAILED, PASSED])
    values = ["500", "61", "9", "2 → 1 → 3", "workerLost 2, headLost 1", "71 s", "12 s"]
    assert row(page, "chaos-2-2") == ["chaos-2-2", *values, "passed"]
    assert row(page, "chaos-1-1") == ["chaos-1-1", *values, "**1 finding**"]


def test_every_finding_is_shown_with_what_it_is_about() -> None:
    page = report([FAILED, PASSED])
    assert "- Seed 1: n2 was not started" in page
    assert "- Seed 1: chaos-1-1: the loss | 5.6 is shown" in page
    assert "- Seed 1: the service: 2 of 1234 requests failed" in page


def test_every_kind_is_counted() -> None:
    page = report([FAILED, PASSED])
    assert row(page, FaultKind.RANK_KILLED) == [FaultKind.RANK_KILLED, "2", ""]
    assert row(page, FaultKind.GCS_KILLED) == [FaultKind.GCS_KILLED, "", "2"]
    assert all(row(page, kind) for kind in FaultKind)


def test_every_kind_has_an_injection() -> None:
    assert INJECT.keys() == set(FaultKind)


def test_newest_record_of_a_schedule_counts(tmp_path: Path) -> None:
    path = tmp_path / "results" / "records.jsonl"
    mended = replace(PASSED, seed=1)
    for record in (PASSED, FAILED, mended):
        records.append(path, record)
    found = records.read(path)
    assert found == [mended, PASSED]
    assert records.schedules_of(found) == {(1, 3, 2), (2, 3, 2)}
    assert records.read(tmp_path / "none.jsonl") == []


def test_record_of_an_older_format_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"seed": 1, "num_faults": 3, "findings": []}) + "\n")
    records.append(path, PASSED)
    assert records.read(path) == [PASSED]


def test_the_page_is_that_of_its_records() -> None:
    assert (ROOT / "docs/chaos.md").read_text() == report(records.read(RECORDS)), "run `make chaos`"
