"""Every parser that reads what others write gives a value, or its documented error: a second of random inputs each."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz.limits import TooSlowError, limited
from tests.fuzz.records import Record, read_records
from tests.fuzz.report import write_page
from tests.fuzz.runner import run_for
from tests.fuzz.target import Target, fuzz
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_every_input_gives_a_value_or_the_documented_error(target: Target) -> None:
    assert fuzz(target, target.examples) > 0


def test_a_hang_is_a_failure() -> None:
    def spin() -> None:
        while True:
            pass

    with pytest.raises(TooSlowError, match="processor"), limited(cpu_seconds=0.05):
        spin()


def test_an_endless_wait_is_a_failure() -> None:
    with pytest.raises(TooSlowError), limited(seconds=0.05):
        threading.Event().wait()


def test_a_blow_up_is_a_failure() -> None:
    with pytest.raises(MemoryError), limited(extra_bytes=64 << 20):
        bytearray(1 << 30)


def _fail_at_seven(value: int) -> None:
    if value == 7:
        raise KeyError(value)


def test_a_failure_is_recorded_and_is_the_first_input_of_the_next_run(tmp_path: Path) -> None:
    target = Target("sevens", "numbers", st.integers(0, 9), _fail_at_seven)
    records = tmp_path / "fuzz.jsonl"
    assert not run_for(target, 0.1, records, tmp_path / "database")
    assert not run_for(target, 0.0, records, tmp_path / "database")
    found = read_records(records)
    assert [record.failures for record in found] == [1, 1]
    assert "KeyError" in (tmp_path / "database" / "sevens.txt").read_text()


def test_the_page_adds_up_what_was_run(tmp_path: Path) -> None:
    records = [Record("job", "abc", 60.0, 1000, 0, "2026-11-27"), Record("job", "def", 30.0, 500, 1, "2026-11-28")]
    page = write_page(records, TARGETS)
    assert "| `job` | FinetuneJob files, as `spotune validate` reads them | 1.5 | 1,500 | 1 |" in page
    assert "`abc`, `def`" in page
    assert "`yaml`" in page.partition("not run")[2]
