"""docs/proof.md has a row for every schedule and control; records of another version of the code are dropped."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.proof import records
from tests.proof.records import ControlRecord, FaultRecord, ScheduleRecord
from tests.proof.report import report
from tests.proof.schedules import FaultKind, InjectionPoint

SAVE = FaultRecord(FaultKind.KILL_WORKER, InjectionPoint.SAVE, step=12, hit=True, world_size=3)
LATE = FaultRecord(FaultKind.KILL_DRIVER, InjectionPoint.RESTORE, step=0, hit=False, world_size=3)
PROVEN = ScheduleRecord(
    seed=2,
    zero_stage=1,
    world_sizes=[2, 3],
    wanted=2,
    blows=[SAVE, LATE],
    generations=3,
    steps_lost=4,
    next_loss=8e-8,
    curve=2e-7,
    findings=[],
    seconds=90.0,
    commit="`0123`",
)
REFUTED = replace(PROVEN, seed=1, world_sizes=[2], findings=["step 3 | is missing", "no model was exported"])
CAUGHT = ControlRecord("torn checkpoint trusted", False, "which is corrupt", ["which is corrupt", "b"], 3.0, "`0123`")
MISSED = ControlRecord("torn checkpoint trusted", True, None, ["something else"], 30.0, "`0123`")


@pytest.fixture
def page() -> list[str]:
    return report([PROVEN, REFUTED, CAUGHT, MISSED], "On a machine.").splitlines()


def row(page: list[str], *begin: str) -> list[str]:
    [found] = [line for line in page if line.startswith(f"| {' | '.join(begin)} |")]
    return [cell.strip() for cell in found.replace("\\|", "/").strip("|").split("|")]


def test_every_schedule_has_a_row(page: list[str]) -> None:
    blows = "one worker killed during save (12); driver killed [during restore] (0)"
    assert row(page, "2", "1") == ["2", "1", "2 → 3", blows, "3", "4", "8e-08", "2e-07", "proven"]
    assert row(page, "1", "1")[-1] == "**not proven**: step 3 / is missing; no model was exported"


def test_every_control_has_a_row(page: list[str]) -> None:
    assert row(page, CAUGHT.control, "ranks")[-1] == "which is corrupt (and 1 more)"
    assert row(page, MISSED.control, "product")[-1] == "**not caught**: something else"


def test_summary_counts(page: list[str]) -> None:
    assert "**1 of 2 schedules proven, 1 of 2 controls caught.** Commit `0123` (4)." in page
    assert "On a machine. 4 minutes in total, one run at a time." in page
    assert any(line.startswith("4 faults, 6 worker group starts, 8 repeated steps") for line in page)
    assert row(page, "one worker killed")[1:] == ["", "", "2", "", ""]


def test_later_record_of_the_same_subject_wins(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for record in (REFUTED, PROVEN, CAUGHT, MISSED, replace(REFUTED, findings=[])):
        records.append(path, record)
    assert records.read(path) == [replace(REFUTED, findings=[]), PROVEN, CAUGHT, MISSED]


def test_records_of_another_version_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    here = replace(PROVEN, commit=f"`{head}`")
    for record in (here, replace(REFUTED, commit=f"`{head}` with uncommitted changes"), CAUGHT):
        records.append(path, record)
    monkeypatch.setattr(records, "_CODE", ("LICENSE",))
    assert records.drop_outdated(path) == records.read(path) == [here]
    assert records.drop_outdated(path, without=range(2, 3)) == records.read(path) == []
