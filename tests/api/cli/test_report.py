"""Files that a command writes are checked before its work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotune.cli.report import writable_file
from spotune.errors import UsageError


def test_missing_folders_are_created_and_the_file_is_not(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "page.html"
    assert writable_file(file, "--file") == file
    assert file.parent.is_dir()
    assert not file.exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--file {tmp_path}: is a folder; give the name of a file"):
        writable_file(tmp_path, "--file")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--report .*: the folder .*/file cannot be created: "):
        writable_file(tmp_path / "file" / "page.html", "--report")


def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(UsageError, match="you may not write there"):
        writable_file(tmp_path / "page.html", "--file")
