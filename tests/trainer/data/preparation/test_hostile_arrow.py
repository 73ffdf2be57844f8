"""Arrow files of strangers, found by fuzzing: a wrong offset ended the whole process with SIGBUS."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc

from spotune.errors import JobError
from spotune_trainer.data.preparation.raw_files import FileRange, InputFile
from spotune_trainer.data.preparation.readers import read_rows


def test_offsets_outside_of_the_file_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    table = pyarrow.table({"q": ["a", "bc"]})
    with ipc.new_file(str(path), table.schema) as sink:
        sink.write_table(table)
    offsets, wrong = struct.pack("<3i", 0, 1, 3), struct.pack("<3i", 0, 1, 1 << 30)
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, wrong))
    file = FileRange(InputFile(path, "arrow"), 0, -1, path.stat().st_size)
    with pytest.raises(JobError, match=r"rows\.arrow is damaged after row 0"):
        list(read_rows(file, ["q"]))
