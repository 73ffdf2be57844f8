"""Files that a simulation reads, which are not what they should be: each error names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune.errors import UsageError
from spotune.simulate.measured import read_timings
from spotune.simulate.terms import Timings
from spotune.simulate.trace import read_trace


def test_trace_in_another_encoding_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_bytes(b"\x80seconds,nodes\n0,4\n60,3\n")
    with pytest.raises(UsageError, match=r"trace\.csv: is not a CSV file in UTF-8"):
        read_trace(file)


@pytest.mark.parametrize(
    "ledger",
    [b"\x80", b'{"time": 1.0}\n', b'{"event": "generation-ended", "generation": 1, "parts": {}, "steps": 3}\n'],
)
def test_edited_ledger_is_an_error(tmp_path: Path, ledger: bytes) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(ledger)
    with pytest.raises(UsageError, match=r"ledger\.jsonl: (is not a ledger|was edited)"):
        read_timings(tmp_path, Timings({1: 1.0}))
