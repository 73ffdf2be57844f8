"""Notices reach the workers by a file, once each, and looking for one costs little."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune_trainer import files
from spotune_trainer.notice import Flags, NoticeWatch, write_notice

NOTHING = Flags()


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("stop", [False, True])
def test_a_notice_raises_its_flags_once(tmp_path: Path, stop: bool) -> None:
    path = tmp_path / "notice.json"
    watch = NoticeWatch(path, Clock())
    assert watch.flags() == NOTHING
    write_notice(path, seconds=25, stop=stop, reason="spot")
    assert watch.flags() == Flags(commit=True, notice=True, stop=stop)
    assert watch.flags() == NOTHING


def test_a_second_notice_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    watch = NoticeWatch(path, Clock())
    files.write_json(path, {"time": 1.0, "deadline": 26.0, "stop": False, "reason": "rebalance"})
    assert watch.flags() == Flags(commit=True, notice=True)
    files.write_json(path, {"time": 2.0, "deadline": 27.0, "stop": True, "reason": "spot"})
    assert watch.flags() == Flags(commit=True, notice=True, stop=True)
    path.unlink()
    assert watch.flags() == NOTHING


def test_the_file_is_not_looked_for_at_every_step(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    now = [0.0]
    watch = NoticeWatch(path, lambda: now[0])
    assert watch.flags() == NOTHING
    write_notice(path, seconds=25, stop=True, reason="spot")
    now[0] = 0.4
    assert watch.flags() == NOTHING
    now[0] = 0.6
    assert watch.flags().stop


def test_a_notice_says_until_when(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    write_notice(path, seconds=25, stop=True, reason="node is drained")
    notice = files.read_json(path)
    assert notice is not None
    assert notice["deadline"] - notice["time"] == pytest.approx(25)
    assert (notice["stop"], notice["reason"]) == (True, "node is drained")


def test_one_rank_asking_is_enough() -> None:
    assert Flags(commit=True) | Flags(stop=True) == Flags(commit=True, notice=False, stop=True)
