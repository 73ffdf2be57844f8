"""Recovery after a killed supervisor: its head, its attempts, and what it left in the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.ray_head.jobs_client import RayJob
from tests.trainer.support.scripted_ray import Run
from tests.trainer.support.tiny import make_job


@pytest.mark.parametrize("found", [True, False], ids=["its Ray lives", "its Ray is gone"])
def test_leftovers_of_a_supervisor_killed_after_training_are_cleaned_up(
    tmp_path: Path, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(Run(tmp_path))
    run.ray.alive = found
    monkeypatch.setattr(run.ray, "reattach", lambda record: found)
    run()
    assert not run.ray.alive
    assert run.ray.starts == 0
    assert not run.directory.supervisor.exists()
    assert run.attempts() == [(1, 0)]
    assert run.causes() == []


def test_driver_lost_before_it_recorded_finished_is_resubmitted(tmp_path: Path) -> None:
    run = finished(Run(tmp_path, 0))
    run.directory.ledger.unlink()
    run()
    assert run.attempts() == [(1, 0)]
    assert run.ray.starts == 1


def finished(run: Run) -> Run:
    """The directory of a run with a trained model, whose supervisor was killed before it cleaned up."""
    put_job(run.directory, make_job("model"))
    files.write_json(run.directory.result, {"steps": 8})
    files.write_json(run.directory.supervisor, {"ray": {}})
    Ledger(run.directory).append("attempt-started", attempt=1)
    Ledger(run.directory).append("finished", step=8)
    return run


def test_attempt_that_ended_without_a_supervisor_is_closed_in_the_ledger(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    Ledger(run.directory).append("attempt-started", attempt=4)
    run()
    assert run.attempts() == [(4, None), (5, 0)]
    assert run.causes() == ["headLost"], "a lost head takes its supervisor along"


def test_lost_attempt_is_recorded_with_the_time_of_its_last_status(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    Ledger(run.directory).append("attempt-started", attempt=4)
    files.write_json(run.directory.status, {"time": 1234.5, "heartbeat": 7, "phase": "Training", "attempt": 4})
    run()
    assert Ledger(run.directory).records("attempt-ended")[0]["lastSeen"] == 1234.5


@pytest.mark.parametrize(("code", "causes"), [(0, []), (10, []), (137, ["headLost"])])
def test_attempt_recorded_in_ray_counts_as_lost_only_after_a_signal(
    tmp_path: Path, code: int, causes: list[str]
) -> None:
    run = Run(tmp_path, 0)
    Ledger(run.directory).append("attempt-started", attempt=4)
    ours = {"spotune-directory": str(tmp_path), "spotune-attempt": "4"}
    run.ray.jobs["earlier"] = RayJob("earlier", "SUCCEEDED" if code == 0 else "FAILED", code, "", ours)
    run()
    assert run.attempts() == [(4, code), (5, 0)]
    assert run.causes() == causes
