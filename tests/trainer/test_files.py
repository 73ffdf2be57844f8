"""Files stay readable after a kill at any time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spotune_trainer import files
from spotune_trainer.files import LineReader

KEEP_WRITING = """
import sys
from pathlib import Path
from spotune_trainer import files
path, number = Path(sys.argv[1]), 0
while True:
    files.write_json(path, {"number": number, "filling": "x" * 100_000}, durable=False)
    number += 1
"""
APPEND = """
import sys
from pathlib import Path
from spotune_trainer import files
for number in range(300):
    files.append_json(Path(sys.argv[1]), {"writer": int(sys.argv[2]), "number": number, "filling": "x" * 500})
"""

FILL_UP = """
import resource, signal, sys
from pathlib import Path
from spotune_trainer import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
folder = Path(sys.argv[1])
for write in (files.append_json, files.write_json):
    try:
        write(folder / "file", {"step": 2, "filling": "x" * 100})
    except OSError:
        continue
    sys.exit("it was written")
"""


def test_a_killed_writer_leaves_a_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    writer = subprocess.Popen([sys.executable, "-c", KEEP_WRITING, str(path)])
    try:
        while not path.exists():
            assert writer.poll() is None
            time.sleep(0.01)
        found = [files.read_json(path) for _ in range(200)]
    finally:
        writer.kill()
        writer.wait()
    found.append(files.read_json(path))
    assert {len(value["filling"]) for value in found if value} == {100_000}
    assert None not in found


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, str(path), str(number)]) for number in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    records = list(files.read_lines(path))
    for writer in range(3):
        assert [record["number"] for record in records if record["writer"] == writer] == list(range(300))


def test_an_incomplete_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    reader = LineReader(path)
    assert reader.read() == []
    with path.open("w") as stream:
        stream.write('{"step":1}\n{"st')
        stream.flush()
        assert reader.read() == [{"step": 1}]
        assert reader.read() == []
        stream.write('ep":2}\n')
    assert reader.read() == [{"step": 2}]
    assert list(files.read_lines(path)) == [{"step": 1}, {"step": 2}]


def test_a_line_truncated_by_a_full_volume_is_an_error_and_harms_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.append_json(path, {"step": 1})
    filled = subprocess.run([sys.executable, "-c", FILL_UP, str(tmp_path)], check=False, capture_output=True, text=True)
    assert filled.returncode == 0, filled.stderr
    assert path.stat().st_size == 40
    files.append_json(path, {"step": 3})
    assert list(files.read_lines(path)) == [{"step": 1}, {"step": 3}]
    assert [each.name for each in tmp_path.iterdir()] == ["file"], "a full volume is not filled with what failed"


def test_a_value_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.write_json(path, {"version": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        files.write_json(path, {"version": object()})
    assert files.read_json(path) == {"version": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_a_missing_file_reads_as_none(tmp_path: Path) -> None:
    assert files.read_json(tmp_path / "notice.json") is None
    assert list(files.read_lines(tmp_path / "steps.jsonl")) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1})[:-3])
    with pytest.raises(ValueError, match=r"plan\.json is not valid JSON .* damaged or edited by hand"):
        files.read_json(path)


def test_a_directory_gets_its_name_once_it_is_filled(tmp_path: Path) -> None:
    target, killed = tmp_path / "new" / "folder", tmp_path / "new" / ".folder.0123abcd"
    killed.mkdir(parents=True)
    (killed / "part").touch()
    with files.new_directory(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("whole")
        assert not target.exists()
    assert (target / "inner" / "file").read_text() == "whole"
    assert list(target.parent.iterdir()) == [target], "what a kill left is gone, too"


def test_a_directory_that_fails_to_fill_is_not_created(tmp_path: Path) -> None:
    def fill() -> None:
        with files.new_directory(tmp_path / "folder") as folder:
            (folder / "part").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    with pytest.raises(OSError, match="not empty"), files.new_directory(tmp_path / "folder"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "mine"]


def test_each_file_that_is_made_durable_is_a_heartbeat(tmp_path: Path) -> None:
    beats: list[None] = []
    with files.replacing_directory(tmp_path / "folder", lambda: None, lambda: beats.append(None)) as folder:
        for name in ("a", "b", "c"):
            (folder / name).touch()
    assert len(beats) == 3
