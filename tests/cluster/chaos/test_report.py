"""docs/chaos.md has a row for every seed, counts every kind of fault, and shows every finding; records are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests import ROOT
from tests.cluster.chaos import records
from tests.cluster.chaos.command import RECORDS
from tests.cluster.chaos.injector import INJECT
from tests.cluster.chaos.records import ChaosRecord, InjectedFault
from tests.cluster.chaos.report import report
from tests.cluster.chaos.schedule import FaultKind

HIT = InjectedFault(FaultKind.RANK_KILLED, 3.0, "worker-a", 0.0, "")
LASTED = InjectedFault(FaultKind.VOLUME_FULL, 9.5, "pvc-1", 7.2, "")
MISSED = InjectedFault(FaultKind.GCS_KILLED, 12.0, "", 0.0, "there is no head pod on a node")
PASSED = ChaosRecord(
    seed=2,
    num_faults=3,
    faults=[HIT, LASTED, MISSED],
    steps=940,
    generations=9,
    world_sizes=[2, 1, 3],
    steps_lost=61,
    restarts={"workerLost": 2, "headLost": 1},
    gap_seconds=71.4,
    recovered_seconds=12.0,
    statuses=300,
    findings=[],
    seconds=540.0,
    commit="`0123`",
    machine="On a machine.",
)
FAILED = replace(PASSED, seed=1, findings=["the loss | 5.6 is shown", "no model was exported"])


def row(page: str, first: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_seed_has_a_row() -> None:
    page = report([FAILED, PASSED])
    values = ["2 of 3", "940", "61", "9", "2 → 1 → 3", "workerLost 2, headLost 1", "71 s", "12 s", "passed"]
    assert row(page, "2") == ["2", *values]
    assert row(page, "1")[-1] == "**2 findings**"
    assert "**1 of 2 seeds passed**, with 4 faults of 2 kinds." in page
    assert "- Seed 1: the loss | 5.6 is shown" in page


def test_every_kind_is_counted() -> None:
    page = report([FAILED, PASSED])
    assert row(page, FaultKind.RANK_KILLED) == [FaultKind.RANK_KILLED, "2", ""]
    assert row(page, FaultKind.GCS_KILLED) == [FaultKind.GCS_KILLED, "", "2"]
    assert all(row(page, kind) for kind in FaultKind)


def test_every_kind_has_an_injection() -> None:
    assert INJECT.keys() == set(FaultKind)


def test_newest_record_of_a_schedule_counts(tmp_path: Path) -> None:
    path = tmp_path / "results" / "records.jsonl"
    for record in (PASSED, FAILED, replace(FAILED, findings=[])):
        records.append(path, record)
    found = records.read(path)
    assert found == [replace(FAILED, findings=[]), PASSED]
    assert records.schedules_of(found) == {(1, 3), (2, 3)}
    assert records.read(tmp_path / "none.jsonl") == []


def test_the_page_is_that_of_its_records() -> None:
    assert (ROOT / "docs/chaos.md").read_text() == report(records.read(RECORDS)), "run `make chaos`"
