"""docs/proof-recovery.md is what its records say; each schedule and control has a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.proof.recovery import records
from tests.proof.recovery.records import KillRecord, Records, RecoveryControlRecord, RecoveryRecord, RestoreRecord
from tests.proof.recovery.report import PAGE, RECORDS, report
from tests.proof.recovery.schedules import Moment, Target, Theme

LOSS = KillRecord(Target.NODE, Moment.COPIED, step=8, hit=True)
MEANWHILE = KillRecord(Target.DRIVER, Moment.RESTORING, step=8, hit=True)
KILLS = "a node once the last commit is copied (8); the driver while it restores (8)"
LATE = KillRecord(Target.DRIVER, Moment.PEER_READ, step=9, hit=False)
PROVEN = RecoveryRecord(
    seed=103,
    theme=Theme.PEER_READ,
    nodes=[1, 1],
    zero_stage=1,
    memory_copies=2,
    resizes=True,
    gpus=False,
    world_sizes=[2, 1],
    planned=3,
    kills=[LOSS, MEANWHILE, LATE],
    restores=[RestoreRecord(2, 100_000, 200_000, 0), RestoreRecord(3, 0, 0, 300_000)],
    generations=3,
    steps_lost=2,
    export_sha256="0" * 64,
    findings=[],
    seconds=60.0,
    commit="`0123`",
    machine="On a machine.",
)
REFUTED = replace(PROVEN, seed=102, findings=["step 3 | is missing"], kills=[LOSS], restores=[], resizes=False)
CAUGHT = RecoveryControlRecord("half-copied commit used", False, "bits", ["bits", "b"], 3.0, "`0123`", "On a machine.")
MISSED = RecoveryControlRecord("half-copied commit used", True, None, ["other"], 57.0, "`0123`", "On a machine.")


@pytest.fixture
def page() -> list[str]:
    return report(Records([REFUTED, PROVEN], [CAUGHT, MISSED])).splitlines()


def row(page: list[str], *begin: str) -> list[str]:
    [found] = [line for line in page if line.startswith(f"| {' | '.join(begin)} |")]
    return [cell.strip() for cell in found.replace("\\|", "/").strip("|").split("|")]


def test_page_is_current() -> None:
    assert PAGE.read_text() == report(records.read(RECORDS))


def test_every_schedule_has_a_row(page: list[str]) -> None:
    assert row(page, "103", "1")[2:] == [
        "1 + 1",
        "2",
        "2 → 1, resizes",
        f"{KILLS}; the driver [while it reads from a peer] (9)",
        "100 + 200 + 0; 0 + 0 + 300",
        "2",
        "proven",
    ]
    assert row(page, "102", "1")[-1] == "**not proven**: step 3 / is missing"


def test_every_control_has_a_row(page: list[str]) -> None:
    assert row(page, CAUGHT.control, "ranks")[-1] == "bits (and 1 more)"
    assert row(page, MISSED.control, "product")[-1] == "**not caught**: other"


def test_summary_counts(page: list[str]) -> None:
    assert "**1 of 2 schedules proven, 1 of 2 controls caught.**" in page
    assert "198 of the 200 schedules have not run yet." in page
    assert "Machine On a machine (4)." in page
    assert "3 minutes in total, one run at a time." in page
    assert (
        "Of 2 groups that restored a commit, 1 read from own memory (0.1 MB), 1 read from a peer's memory (0.2 MB), "
        "1 read from the volume (0.3 MB); 1 read from several of these."
    ) in page


def test_what_came_too_late_is_not_counted(page: list[str]) -> None:
    assert row(page, "a kill during a recovery")[1] == "1"
    assert row(page, "a kill while a rank read from a peer")[1] == "0"
    moments = [moment.value for moment in Moment]
    cells = dict(zip(moments, row(page, "the driver")[1:], strict=True))
    assert {moment for moment, count in cells.items() if count} == {Moment.RESTORING.value}


def test_later_record_of_the_same_subject_wins(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for record in (PROVEN, REFUTED, MISSED, CAUGHT, replace(REFUTED, findings=[])):
        records.append(path, record)
    assert records.read(path) == Records([replace(REFUTED, findings=[]), PROVEN], [CAUGHT, MISSED])
