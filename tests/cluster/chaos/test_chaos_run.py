"""Times of steps that a run is judged by, read from the files of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory
from tests.cluster.chaos.chaos_run import all_intervals, longest_gap_seconds
from tests.cluster.faults.timeline import TrainingInterval
from tests.cluster.finetune_jobs import RunArtifacts
from tests.proof.history import read_generations


def a_generation(artifacts: RunArtifacts, started_at: float, steps: range, *, wrote_progress: bool) -> None:
    restored = CheckpointName(steps[0] - 1, 1) if steps[0] > 1 else None
    logs = artifacts.directory.generation_logs(claim(artifacts.directory, restored).number)
    logs.root.mkdir(parents=True)
    for step in steps:
        files.append_json(logs.steps, {"step": step, "seconds": 0.5})
    startup = {"firstStep": 0.5} if wrote_progress else {}
    files.write_json(logs.progress, {"startedAt": started_at, "startup": startup})


def test_group_that_was_lost_right_after_its_first_step_has_an_interval(tmp_path: Path) -> None:
    artifacts = RunArtifacts(JobDirectory(tmp_path))
    a_generation(artifacts, 100.0, range(1, 11), wrote_progress=True)
    a_generation(artifacts, 150.0, range(7, 8), wrote_progress=False)
    begin = read_generations(artifacts.directory)[-1].claimed
    artifacts.ledger.append_record({"time": begin + 20.0, "event": "failure", "generation": 2})
    first, second = all_intervals(artifacts)
    assert (first.generation, second.generation) == (1, 2)
    assert (second.begin, second.end) == (begin, begin + 20.0)


def test_longest_gap_is_between_any_two_steps_before_a_time() -> None:
    first = TrainingInterval(1, 99.0, {1: 100.0, 2: 101.0}, {})
    second = TrainingInterval(2, 130.0, {2: 131.0, 3: 140.0, 4: 200.0}, {})
    assert longest_gap_seconds([first, second], until=150.0) == pytest.approx(30.0)
    assert longest_gap_seconds([first, second], until=250.0) == pytest.approx(60.0)
    assert longest_gap_seconds([], until=250.0) == 0.0
