"""docs/faults.md has a row for every fault, including those that failed or were not run."""

from pathlib import Path

import pytest

from tests.cluster.faults import records
from tests.cluster.faults.catalogue import CASES
from tests.cluster.faults.records import VARIABLE, read_records, recorded
from tests.cluster.faults.report import ROWS, report


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The page after one fault passed and one failed."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "records.jsonl"))
    monkeypatch.setattr(records, "commit", lambda: "`0123`")
    with recorded(CASES[0].name) as record:
        record.restarts, record.detect_seconds, record.new_step_seconds = {"workerLost": 1}, 1.2, 33.3
    with pytest.raises(AssertionError), recorded(CASES[1].name):
        raise AssertionError("the weights | are others\nand more")
    return report(ROWS, read_records(tmp_path / "records.jsonl"), "On a machine.").splitlines()


def _row(page: list[str], name: str) -> list[str]:
    [row] = [line for line in page if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.replace("\\|", "/").strip("|").split("|")]


def test_every_fault_has_a_row(page: list[str]) -> None:
    assert [_row(page, case.name)[1] for case in CASES] == [case.asserted for case in CASES]
    left = f"{len(CASES) - 2} of the {len(CASES)} faults have not been injected yet."
    assert f"**1 of 2 passed.** {left} Commit `0123` (2 faults). On a machine." in page


def test_row_shows_restarts_times_and_result(page: list[str]) -> None:
    assert _row(page, CASES[0].name)[2:] == ["workerLost 1", "1 s", "33 s", "", "passed"]
    assert _row(page, CASES[1].name)[2:] == ["none", "", "", "", "**failed**: AssertionError: the weights / are others"]
    assert _row(page, CASES[2].name)[2:] == ["", "", "", "", "**not run**"]


@pytest.mark.usefixtures("page")
def test_fault_that_passed_is_skipped_in_the_next_sitting() -> None:
    with pytest.raises(pytest.skip.Exception, match="passed at commit `0123`"), recorded(CASES[0].name):
        pass
    with recorded(CASES[1].name) as record:
        record.restarts = {"workerLost": 1}
    with pytest.raises(pytest.skip.Exception), recorded(CASES[1].name):
        pass
