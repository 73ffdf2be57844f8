"""Checks of the volume: free space, file system semantics, and the time of a commit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotune.plan.parameters import TrainedParameters
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.storage import (
    StorageError,
    StorageNeed,
    check_commit_time,
    check_file_system,
    check_space,
    storage_need,
)
from tests.trainer.support.checkpoints import commit_checkpoint
from tests.trainer.support.tiny import make_job

MILLION = 1_000_000
BILLION = 1_000_000_000


def need(directory: Path, parameters: int | None, **sections: Any) -> StorageNeed:
    trained = TrainedParameters(parameters) if parameters is not None else None
    return storage_need(make_job("/model", **sections), trained, JobDirectory(directory))


def ticking(step: float) -> Callable[[], float]:
    """A clock that advances by `step` seconds at each reading."""
    return itertools.count(step=step).__next__


# Space


def test_space_is_needed_for_one_more_checkpoint_than_kept_and_for_the_model(tmp_path: Path) -> None:
    found = need(tmp_path, MILLION, model={"dtype": "bfloat16"}, checkpoint={"keep": 3})
    assert (found.checkpoint, found.export) == (12 * MILLION, 2 * MILLION)
    assert found.needed_bytes == 4 * 12 * MILLION + 2 * MILLION
    assert need(tmp_path, MILLION, model={"dtype": "float32"}).export == 4 * MILLION
    message = check_space(found, tmp_path)
    assert "50.0 MB are needed: 4 x 12.0 MB of checkpoints (checkpoint.keep + 1) and 2.0 MB of the finished" in message


def test_a_moving_average_is_in_checkpoints_and_in_an_export_of_its_own(tmp_path: Path) -> None:
    found = need(tmp_path, MILLION, model={"dtype": "bfloat16"}, training={"epochs": 1, "emaDecay": 0.999})
    assert (found.checkpoint, found.export) == (16 * MILLION, 2 * 2 * MILLION)


def test_existing_checkpoints_need_no_more_space(tmp_path: Path) -> None:
    for step, missing in ((1, 2), (2, 1), (3, 1)):
        commit_checkpoint(JobDirectory(tmp_path), step, 1)
        found = need(tmp_path, MILLION, checkpoint={"keep": 2}).new_checkpoints
        assert found == missing, f"{step} there: the next one is written before another is deleted"
    (tmp_path / "checkpoints" / "step-00000003.gen-1" / "manifest.json").unlink()
    message = check_space(need(tmp_path, MILLION, checkpoint={"keep": 2}), tmp_path)
    assert "1 x 12.0 MB of checkpoints (checkpoint.keep + 1; 2 exist already)" in message, "torn ones do not count"


def test_best_checkpoint_needs_space_of_its_own(tmp_path: Path) -> None:
    evaluation = {"everySteps": 2, "best": {"metric": "loss"}}
    found = need(tmp_path, MILLION, training={"epochs": 1, "evaluation": evaluation}, checkpoint={"keep": 2})
    assert found.new_checkpoints == 4
    assert "4 x 12.0 MB of checkpoints (checkpoint.keep + the best + 1) and" in check_space(found, tmp_path)
    few = need(
        tmp_path, MILLION, training={"maxSteps": 4, "evaluation": evaluation}, checkpoint={"keep": 2, "every": 4}
    )
    assert few.new_checkpoints == 3, "one by its interval, two by evaluations"
    of_tasks = {"harness": {"tasks": ["arc_easy"], "everySteps": 4}, "best": {"metric": "arc_easy/acc"}}
    few = need(tmp_path, MILLION, training={"maxSteps": 4, "evaluation": of_tasks}, checkpoint={"keep": 2, "every": 4})
    assert few.new_checkpoints == 2, "one by its interval, one by an evaluation of tasks"


def test_run_of_few_commits_needs_space_for_those_only(tmp_path: Path) -> None:
    for steps, every, missing in ((4, 4, 1), (5, 4, 2), (400, 4, 3), (1, "auto", 1), (400, "auto", 3), (None, 4, 3)):
        training: dict[str, Any] = {"epochs": 1} if steps is None else {"maxSteps": steps}
        found = need(tmp_path, MILLION, training=training, checkpoint={"keep": 2, "every": every})
        assert found.new_checkpoints == missing, f"{steps} steps with a commit every {every}"
    few = need(tmp_path, MILLION, training={"maxSteps": 4}, checkpoint={"keep": 2, "every": 4})
    assert "1 x 12.0 MB of checkpoints (all that it makes) and" in check_space(few, tmp_path)


def test_too_little_space_fails_with_figures_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"only .* are free, but 38\.0 PB are needed") as failed:
        check_space(need(tmp_path, 10**15, model={"dtype": "bfloat16"}), tmp_path / "not" / "there" / "yet")
    assert str(failed.value).endswith("Make the volume larger (storage.size), or lower checkpoint.keep")


def test_unknown_size_is_taken_from_existing_checkpoints_or_passes(tmp_path: Path) -> None:
    assert "the needed space is unknown" in check_space(need(tmp_path, None), tmp_path)
    commit_checkpoint(JobDirectory(tmp_path), 1, 1)
    found = need(tmp_path, None)
    assert found.checkpoint == (tmp_path / "checkpoints/step-00000001.gen-1/rank-00000.safetensors").stat().st_size


def test_checkpoints_that_stay_for_good_are_mentioned(tmp_path: Path) -> None:
    message = check_space(need(tmp_path, MILLION, checkpoint={"keepEverySteps": 500}), tmp_path)
    assert message.endswith("; another 12.0 MB every 500 steps (checkpoint.keepEverySteps)")


# Semantics


def test_volume_with_the_semantics_of_posix_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "job" / ".preflight-ofalostone").mkdir(parents=True)
    assert check_file_system(tmp_path / "job") == (
        f"uid {os.getuid()} can write, sync, rename over files and claim folders in {tmp_path}/job"
    )
    assert list((tmp_path / "job").iterdir()) == []


def test_read_only_volume_fails_with_the_user_and_the_remedy() -> None:
    with pytest.raises(StorageError, match=rf"uid {os.getuid()} cannot write to /sys/job \(.*\): give the volume"):
        check_file_system(Path("/sys/job"))


# Time


def test_commit_time_follows_from_the_measured_speed(tmp_path: Path) -> None:
    message = check_commit_time(need(tmp_path, 10 * MILLION), tmp_path, None, ticking(1.0))
    # Of 120 MB in blocks of 8 MiB four are written in the first five seconds; the clock is read twice after them.
    assert message == "one writer writes 5.6 MB a second to this volume, so a commit of 120.0 MB takes 21.5 s"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("notice", "beginning", "end"),
    [
        (100.0, "one writer", "and fits into the notice of 100 s"),
        (10.0, "WARNING: one writer", "or commit more often (checkpoint.every)"),
        (3.0, "WARNING: one writer", "or commit more often (checkpoint.every)"),
    ],
)
def test_commit_that_is_longer_than_the_notice_gives_a_warning(
    tmp_path: Path, notice: float, beginning: str, end: str
) -> None:
    found = need(tmp_path, 10 * MILLION, workers={"count": 4, "gpus": 0})
    message = check_commit_time(found, tmp_path, notice, ticking(1.0))
    assert message.startswith(beginning)
    assert message.endswith(end)
    assert "takes 5.4 s to 21.5 s with 4 writers" in message
    assert ("may not fit" in message, "does not fit" in message) == (notice == 10.0, notice == 3.0)


def test_measurement_is_short_for_a_small_model_and_for_a_slow_volume(tmp_path: Path) -> None:
    readings: list[None] = []

    def clock() -> float:
        readings.append(None)
        return float(len(readings) * 3)

    check_commit_time(need(tmp_path, 1), tmp_path, None, clock)
    assert len(readings) == 4, "begun, two blocks, ended"


def test_speed_is_measured_for_a_model_of_unknown_size_too(tmp_path: Path) -> None:
    assert "the time of a commit is unknown" in check_commit_time(need(tmp_path, None), tmp_path, 30.0)


def test_volume_that_cannot_be_measured_fails() -> None:
    with pytest.raises(StorageError, match=r"/sys/job"):
        check_commit_time(need(Path("/sys/job"), MILLION), Path("/sys/job"), None)
