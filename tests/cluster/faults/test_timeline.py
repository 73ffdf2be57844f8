"""Times of steps and of a recovery, computed from the files of a job."""

from pathlib import Path
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from tests.cluster.faults.timeline import recovery, training_intervals
from tests.cluster.finetune_jobs import RunArtifacts

STARTUP = {"data": 1.0, "engine": 3.0, "firstStep": 0.5}


def a_generation(
    artifacts: RunArtifacts, started_at: float, steps: range, restored: CheckpointName | None = None
) -> None:
    """A worker group that makes a step in half a second."""
    generation = claim(artifacts.directory, restored)
    record = {"time": started_at - 2, "event": "generation-started", "generation": generation.number}
    artifacts.ledger.append_record(record)
    logs = artifacts.directory.generation_logs(generation.number)
    logs.root.mkdir(parents=True)
    for step in steps:
        files.append_json(logs.steps, {"step": step, "seconds": 0.5})
    files.write_json(logs.progress, {"startedAt": started_at, "startup": STARTUP})


def a_job(folder: Path, *events: dict[str, Any]) -> RunArtifacts:
    """Ten steps from 104, a loss, and seven more from 154 that begin at step 7."""
    artifacts = RunArtifacts(JobDirectory(folder))
    a_generation(artifacts, 100.0, range(1, 11))
    for event in events:
        Ledger(artifacts.directory).append_record(event)
    a_generation(artifacts, 150.0, range(7, 14), CheckpointName(6, 1))
    return artifacts


def test_steps_follow_the_start_of_their_group(tmp_path: Path) -> None:
    first, second = training_intervals(a_job(tmp_path))
    assert (first.generation, second.generation) == (1, 2)
    assert [first.begin, first.steps[1], first.end] == pytest.approx([104.0, 104.5, 109.0])
    assert second.steps == pytest.approx({step: 154.5 + 0.5 * (step - 7) for step in range(7, 14)})


def test_first_new_step_is_the_one_after_all_that_was_lost(tmp_path: Path) -> None:
    failure = {"time": 111.0, "event": "failure", "generation": 1, "cause": "workerLost", "message": "", "step": 10}
    found = recovery(a_job(tmp_path, failure), injected_at=109.5)
    assert found is not None
    assert [found.seconds_to_detect, found.started, found.first_begin] == pytest.approx([1.5, 148.0, 154.0])
    assert found.seconds_to_new_step == pytest.approx(156.5 - 109.5), "steps 7 to 10 had been made before"


def test_what_interrupts_nothing_has_no_recovery(tmp_path: Path) -> None:
    assert recovery(a_job(tmp_path), injected_at=156.0) is None
