"""What is shown of a run comes from files that other processes write; a damaged one does not end the job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from spotune.job import RetrySpec
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.attempt import RunWatch
from spotune_trainer.supervisor.console import PlainView


@pytest.mark.parametrize("progress", [{}, {"heartbeat": None}, {"heartbeat": 1, "step": "many"}])
def test_unreadable_report_of_workers_is_not_shown(tmp_path: Path, progress: dict[str, Any]) -> None:
    directory, lines = JobDirectory(tmp_path), list[str]()
    directory.generation_logs(2).root.mkdir(parents=True)
    files.write_json(directory.generation_logs(2).progress, progress)
    status = {"phase": "Starting", "generation": 2, "step": 75, "heartbeat": 9, "time": time.time(), "message": None}
    files.write_json(directory.status, status)
    watch = RunWatch(directory, RetrySpec, PlainView(lines.append), 10.0, verbose=False)
    watch.poll()
    assert watch.highest_step == 75
    assert lines == ["Starting: step 75"]
