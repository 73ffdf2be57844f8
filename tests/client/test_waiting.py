"""Waiting for a job with a timeout, and the printed messages."""

import pytest

from spotune.errors import KubernetesError
from spotune_client.waiting import Poller


class Clock:
    """A clock that advances only in pauses."""

    def __init__(self) -> None:
        self.now = 0.0

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def poller(self, seconds: float | None) -> Poller:
        return Poller(seconds, lambda: self.now, self.pause)


def test_pending_state_is_printed_only_when_it_changes() -> None:
    notified: list[str] = []
    answers = iter(["2 pods", "2 pods", "1 pod", ""])
    Clock().poller(None).wait(lambda: next(answers), notified.append)
    assert notified == ["waiting: 2 pods", "waiting: 1 pod"]


def test_nothing_is_printed_if_nothing_is_pending() -> None:
    notified: list[str] = []
    clock = Clock()
    clock.poller(0).wait(lambda: "", notified.append)
    assert (notified, clock.now) == ([], 0)


def test_timeout_error_names_what_is_still_pending() -> None:
    clock = Clock()
    with pytest.raises(KubernetesError, match="timed out after 1 min 00 s; still waiting: 2 pods"):
        clock.poller(60).wait(lambda: "2 pods", lambda _: None)
    assert clock.now == 60
