"""Files of a run that were damaged or edited: each error names the file, and nothing hangs. Found by fuzzing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.files import UnreadableFileError, is_inner_path, read_json
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.notice import NoticeWatch, is_stop_requested
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.job_directory.status import read_status


@pytest.mark.parametrize(
    "content", [b"{", b"\x80", b"[" * 5000, b"[]", b'"x"'], ids=["cut", "bytes", "deep", "list", "text"]
)
def test_what_is_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(UnreadableFileError, match=r"status\.json is not"):
        read_json(tmp_path / "status.json")


@pytest.mark.parametrize("status", [{}, {"time": None}, {"time": "x"}])
def test_status_without_a_time_is_named(tmp_path: Path, status: dict[str, Any]) -> None:
    (tmp_path / "status.json").write_text(json.dumps(status))
    with pytest.raises(UnreadableFileError, match=r"status\.json has content"):
        read_status(JobDirectory(tmp_path))


@pytest.mark.parametrize(
    "event",
    [
        {"time": 1.0},
        {"time": 1.0, "event": "failure", "cause": "unheard", "step": 1, "message": ""},
        {"time": 1.0, "event": "failure", "cause": "hang", "message": ""},
        {"time": float("nan"), "event": "failure", "cause": "hang", "step": 1, "message": ""},
        {"time": 1.0, "event": "failure", "cause": "hang", "step": "1", "message": ""},
    ],
)
def test_event_that_spotune_has_not_written_is_named(tmp_path: Path, event: dict[str, Any]) -> None:
    (tmp_path / "ledger.jsonl").write_text(json.dumps(event) + "\n")
    with pytest.raises(UnreadableFileError, match=r"ledger\.jsonl"):
        Ledger(JobDirectory(tmp_path)).failures()


@pytest.mark.parametrize("time", [10**400, float("nan"), float("inf")])
def test_time_that_is_no_number_of_seconds_is_named(tmp_path: Path, time: float) -> None:
    (tmp_path / "ledger.jsonl").write_text(json.dumps({"time": time, "event": "stopped"}) + "\n")
    with pytest.raises(UnreadableFileError, match=r"has the time .* which is not a number"):
        Ledger(JobDirectory(tmp_path)).records()


def test_lines_that_are_no_objects_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('3\n"x"\n' + "[" * 5000 + '\n{"time": 1.0, "event": "stopped"}\n')
    assert [record["event"] for record in Ledger(JobDirectory(tmp_path)).records()] == ["stopped"]


@pytest.mark.parametrize("notice", [{}, {"time": 1.0, "deadline": [], "stop": False, "reason": ""}, {"time": "x"}])
def test_edited_notice_is_named(tmp_path: Path, notice: dict[str, Any]) -> None:
    directory = JobDirectory(tmp_path)
    directory.notice.write_text(json.dumps(notice))
    with pytest.raises(UnreadableFileError, match=r"notice\.json"):
        is_stop_requested(directory)
    with pytest.raises(UnreadableFileError, match=r"notice\.json"):
        NoticeWatch([directory.notice]).flags(1.0)


def test_generations_that_start_from_each_other_do_not_hang(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    folder = directory.generations / "0000001"
    folder.mkdir(parents=True)
    (folder / "restored.json").write_text(json.dumps({"checkpoint": "step-00000010.gen-1"}))
    with pytest.raises(UnreadableFileError, match="generation 1 cannot start from a checkpoint of generation 1"):
        surviving_steps(directory)


@pytest.mark.parametrize("plan", [{}, {"version": 1, "unheard": 2}, {"version": "x"}])
def test_edited_plan_is_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        RunPlan.from_json(plan)


@pytest.mark.parametrize("name", ["shard.00000.mds", "a/b.mds", "é.bin"])
def test_names_in_a_folder_are_recognised(name: str) -> None:
    assert is_inner_path(name)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", ".", "a\0b", "a\nb", "x" * 256])
def test_names_elsewhere_are_recognised(name: str) -> None:
    assert not is_inner_path(name)
