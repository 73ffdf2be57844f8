"""Notices reach the workers by files, once each; the reaction depends on the time to the deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.notice import Flags, NoticeWatch, write_notice

NOTHING = Flags()
COMMIT = Flags(commit=True, notice=True)
LEAVE = Flags(commit=True, notice=True, leave=True)


@dataclass
class Training:
    """Steps of one second each on an artificial clock; notices are polled before each step."""

    path: Path
    now: float = 0.0
    watch: NoticeWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = NoticeWatch([self.path.parent / "other.json", self.path], lambda: self.now, lambda: self.now)

    def step(
        self, commit_seconds: float | None = 2.0, seconds: float = 1.0, *, is_due: bool = False, pending: bool = False
    ) -> Flags:
        self.now += seconds
        return self.watch.flags(commit_seconds, is_due=is_due, is_pending=pending)

    def told_to_leave(self, within: float | None, commit_within: float = 0.0) -> None:
        """A notice from the driver."""
        deadline = self.now + within if within is not None else None
        notice = {"time": self.now, "deadline": deadline, "stop": False, "leave": True, "reason": "a node goes"}
        files.write_json(self.path, {**notice, "commitWithin": commit_within})

    def until_it_leaves(self, commit_seconds: float | None = 2.0, step_seconds: float = 1.0) -> float:
        """The time at which the group is told to leave."""
        while not self.step(commit_seconds, step_seconds).leave:
            assert self.now < 1000
        return self.now


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "notice.json")


@pytest.mark.parametrize("stop", [False, True])
def test_a_notice_raises_its_flags_once(training: Training, stop: bool) -> None:
    assert training.step() == NOTHING
    files.write_json(training.path, {"time": 1.0, "deadline": 26.0, "stop": stop, "reason": "spot"})
    assert training.step() == Flags(commit=True, notice=True, stop=stop)
    assert training.step() == NOTHING


def test_a_second_notice_is_another_one(training: Training) -> None:
    files.write_json(training.path, {"time": 1.0, "deadline": 26.0, "stop": False, "reason": "rebalance"})
    assert training.step() == COMMIT
    files.write_json(training.path, {"time": 2.0, "deadline": 27.0, "stop": True, "reason": "spot"})
    assert training.step() == Flags(commit=True, notice=True, stop=True)
    training.path.unlink()
    assert training.step() == NOTHING


def test_every_file_is_polled(training: Training) -> None:
    training.told_to_leave(None)
    write_notice(training.path.with_name("other.json"), seconds=None, reason="stop", stop=True)
    assert training.step() == Flags(commit=True, notice=True, stop=True, leave=True)
    assert training.step() == NOTHING


def test_files_are_not_polled_at_every_step(training: Training) -> None:
    assert training.step() == NOTHING
    training.told_to_leave(None)
    assert training.step(seconds=0.4) == NOTHING
    assert training.step(seconds=0.2) == LEAVE


def test_a_notice_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    write_notice(path, seconds=25, stop=True, reason="node is drained")
    notice = files.read_json(path)
    assert notice is not None
    assert notice["deadline"] - notice["time"] == pytest.approx(25)
    assert (notice["stop"], notice["leave"], notice["reason"]) == (True, False, "node is drained")


def test_one_rank_is_enough_to_request_an_action() -> None:
    assert Flags(commit=True) | Flags(stop=True) == Flags(commit=True, notice=False, stop=True)
    assert Flags(leave=True) | NOTHING == NOTHING | Flags(leave=True) == Flags(leave=True)


def test_a_group_with_a_deadline_commits_at_once_and_leaves_when_its_last_commit_just_fits(training: Training) -> None:
    training.told_to_leave(within=60)
    assert training.step(commit_seconds=4) == COMMIT
    left = 60 - training.until_it_leaves(commit_seconds=4)
    assert 4 < left <= 15


@pytest.mark.parametrize("step_seconds", [1.0, 5.0, 12.0])
def test_longer_steps_mean_an_earlier_last_commit(training: Training, step_seconds: float) -> None:
    """An action that is decided before a step is executed after it."""
    training.told_to_leave(within=120)
    training.step(seconds=step_seconds)
    asked = training.until_it_leaves(commit_seconds=4, step_seconds=step_seconds)
    assert asked + step_seconds + 4 < 120


def test_a_short_notice_allows_the_one_commit_that_fits(training: Training) -> None:
    training.told_to_leave(within=10)
    assert training.step(commit_seconds=6) == LEAVE


def test_training_continues_if_no_commit_fits(training: Training) -> None:
    training.told_to_leave(within=5)
    assert training.step(commit_seconds=8) == Flags(notice=True)
    assert {training.step(commit_seconds=8) for _ in range(30)} == {NOTHING}


def test_a_commit_of_unknown_duration_is_tried(training: Training) -> None:
    training.told_to_leave(within=30)
    assert training.step(commit_seconds=None) == COMMIT
    assert training.until_it_leaves(commit_seconds=None) < 30


def test_without_a_deadline_the_group_leaves_after_a_commit_of_any_duration(training: Training) -> None:
    training.told_to_leave(within=None)
    assert training.step(commit_seconds=1e6) == LEAVE


def test_group_that_grows_leaves_with_the_commit_that_is_due(training: Training) -> None:
    training.told_to_leave(None, commit_within=10)
    assert training.step() == Flags(notice=True)
    assert training.step() == NOTHING
    assert training.step(is_due=True) == LEAVE
    assert training.step(is_due=True) == NOTHING


def test_group_that_grows_makes_a_commit_if_none_is_due_in_time(training: Training) -> None:
    training.told_to_leave(None, commit_within=10)
    waited = 0
    while not training.step().leave:
        waited += 1
    assert waited == 9


def test_pending_commit_is_durable_before_the_last_one_begins(training: Training) -> None:
    training.told_to_leave(None, commit_within=3)
    assert training.step(pending=True) == Flags(notice=True)
    assert {training.step(pending=True) for _ in range(20)} == {NOTHING}
    assert training.step() == LEAVE


def test_notice_of_an_earlier_version_has_no_wait_for_a_commit(training: Training) -> None:
    notice = {"time": 0.5, "deadline": None, "stop": False, "leave": True, "reason": "there are more slots"}
    files.write_json(training.path, notice)
    assert training.step() == LEAVE
