"""docs/serving-faults.md has a row for every fault, including those that failed or were not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.serving_faults import records
from tests.cluster.serving_faults.catalogue import CASES, OTHERS
from tests.cluster.serving_faults.records import TOKENS, VARIABLE, Record, read_records, recorded
from tests.cluster.serving_faults.report import report


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page after one fault passed and one failed."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "records.jsonl"))
    monkeypatch.setattr(records, "commit", lambda: "`0123`")
    with recorded(CASES[0].name) as record:
        record.requests = record.in_mid_answer = 220
        record.resumptions, record.gap_p50_seconds, record.gap_max_seconds, record.ready_seconds = 94, 1.3, 32.1, 19.6
    with pytest.raises(AssertionError), recorded(CASES[1].name) as record:  # noqa: PT012 - the record is of the failure
        record.requests, record.other_text = 220, 3
        raise AssertionError("3 texts | differ\nand more")
    return report(read_records(tmp_path / "records.jsonl"))


def _row(page: str, name: str) -> list[str]:
    [row] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.replace("\\|", "/").strip("|").split("|")]


def test_every_fault_has_a_row(page: str) -> None:
    assert all(_row(page, name) for name in [*(case.name for case in CASES), *OTHERS])
    assert f"**1 of {len(CASES) + len(OTHERS)} passed.**" in page
    assert "0 of 440 requests failed, and 3 had another text. Commit `0123` (2 faults)." in " ".join(page.split())


def test_page_names_the_lengths_of_the_answers(page: str) -> None:
    assert f"An answer has {TOKENS} tokens." in " ".join(page.split())
    former = {CASES[0].name: Record(CASES[0].name, requests=220), CASES[1].name: Record(CASES[1].name, tokens=TOKENS)}
    assert f"An answer has 256 or {TOKENS} tokens." in " ".join(report(former).split())


def test_page_says_that_replicas_of_old_records_may_still_have_loaded(page: str) -> None:
    assert "may still have been loading its model" not in " ".join(page.split())
    old = report({CASES[0].name: Record(CASES[0].name)})
    assert "may still have been loading its model" in " ".join(old.split())


def test_row_shows_what_was_measured(page: str) -> None:
    assert _row(page, CASES[0].name)[1:] == ["220", "94", "0", "0", "1.3 s", "32.1 s", "20 s", "passed"]
    assert _row(page, CASES[1].name)[-1] == "**failed**: AssertionError: 3 texts / differ"
    assert _row(page, CASES[2].name)[-1] == "**not run**"
