"""What the driver takes from the ledger and from the files of the running generation as measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spotune.resize.times import MeasuredTimes
from spotune_trainer import files
from spotune_trainer.driver.world_size.measured_times import lost_early_share, measured_times, steps_left
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger

PROGRESS = {
    "startedAt": 203.0,
    "step": 50,
    "totalSteps": 450,
    "seconds": {"productive": 18.0, "dataWait": 2.0, "checkpointStall": 7.0, "startup": 5.0},
    "startup": {"data": 1.0, "engine": 2.0, "restore": 4.0, "reference": 90.0, "evaluation": 60.0, "firstStep": 0.5},
}


@pytest.fixture
def ledger(directory: JobDirectory) -> Ledger:
    """Two workers have trained, restored nothing and left; three continue from step 40."""
    made = Ledger(directory)
    made.append_record({"event": "generation-started", "time": 100.0, "generation": 1, "step": 0, "worldSize": 2})
    commit = {"event": "committed", "time": 190.0, "generation": 1, "step": 40}
    made.append_record({**commit, "seconds": 9.0, "stallSeconds": 1.0})
    parts = {"productive": 30.0, "dataWait": 2.0}
    made.append("generation-ended", generation=1, worldSize=2, steps=40, seconds=90.0, parts=parts)
    started = {"event": "generation-started", "time": 200.0, "generation": 2, "step": 40, "worldSize": 3}
    made.append_record({**started, "planSeconds": 0.25})
    made.append_record({**commit, "generation": 2, "seconds": 8.0, "stallSeconds": 0.5})
    return made


def measured(ledger: Ledger, directory: JobDirectory, **progress: Any) -> MeasuredTimes | str:
    logs = directory.generation_logs(2)
    logs.root.mkdir(parents=True, exist_ok=True)
    files.write_json(logs.progress, {**PROGRESS, **progress})
    return measured_times(ledger, logs, 2)


def test_times_are_those_of_the_running_group_and_of_earlier_ones(ledger: Ledger, directory: JobDirectory) -> None:
    found = measured(ledger, directory)
    assert isinstance(found, MeasuredTimes)
    assert found.step == {2: 0.8, 3: 2.0}
    assert (found.commit, found.stall) == (8.0, 0.5)
    assert found.change == {
        "plan": 0.25,
        "workers": 3.0,
        "data": 1.0,
        "engine": 2.0,
        "restore": 4.0,
        "firstStep": 0.5,
    }
    assert found.change_seconds == 10.75
    assert found.step_seconds(6) == 1.0, "half of the time of three"
    assert steps_left(directory.generation_logs(2)) == 400


def test_unmeasured_restore_counts_as_long_as_an_earlier_one_or_a_commit(
    ledger: Ledger, directory: JobDirectory
) -> None:
    fresh = measured(ledger, directory, startup={"engine": 2.0})
    assert isinstance(fresh, MeasuredTimes)
    assert fresh.change["restore"] == 8.0
    ledger.append("generation-ended", generation=0, worldSize=4, steps=0, seconds=9.0, parts={"restore": 3.0})
    later = measured(ledger, directory, startup={"engine": 2.0})
    assert isinstance(later, MeasuredTimes)
    assert later.change["restore"] == 3.0
    assert 4 not in later.step, "a group without steps has measured none"


@pytest.mark.parametrize(
    ("progress", "problem"),
    [
        ({"step": 44}, "the workers have made fewer than 5 steps since their start"),
        ({"seconds": {}}, "the duration of a step is not known"),
    ],
)
def test_what_is_missing_is_named(
    ledger: Ledger, directory: JobDirectory, progress: dict[str, Any], problem: str
) -> None:
    assert measured(ledger, directory, **progress) == problem


def test_nothing_is_measured_before_the_first_step_and_the_first_commit(directory: JobDirectory) -> None:
    ledger, logs = Ledger(directory), directory.generation_logs(2)
    ledger.append("generation-started", generation=2, step=0, worldSize=3)
    assert measured_times(ledger, logs, 2) == "the workers have made fewer than 5 steps since their start"
    assert steps_left(logs) == math.inf
    assert measured(ledger, directory) == "there was no commit yet"


def test_share_of_nodes_lost_early_counts_each_generation_once(directory: JobDirectory) -> None:
    ledger = Ledger(directory)
    assert lost_early_share(ledger) == 0
    for generation, seconds in ((1, 30.0), (1, 10.0), (2, 30.0), (3, None)):
        ledger.append("leaving", generation=generation, seconds=seconds)
    ledger.append("failure", generation=1, cause="preempted", message="lost", step=1, beforeDeadline=True)
    ledger.append("failure", generation=2, cause="preempted", message="the state is committed", step=1)
    assert lost_early_share(ledger) == pytest.approx(1 / 3)
