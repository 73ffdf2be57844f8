"""Waiting for a job with a timeout, and the printed messages."""

from collections.abc import Callable

import pytest

from spotune.errors import KubernetesError, NotFoundError, RefusedError, TimedOutError
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


def answering(*answers: str | KubernetesError) -> Callable[[], str]:
    """A function that returns or raises one answer after the other."""
    left = iter(answers)

    def pending() -> str:
        answer = next(left)
        if isinstance(answer, KubernetesError):
            raise answer
        return answer

    return pending


def test_wait_goes_on_while_the_api_server_is_away() -> None:
    notified: list[str] = []
    gone, failing = KubernetesError("the server does not answer"), KubernetesError("internal error", 500)
    Clock().poller(None).wait(answering(gone, gone, failing, "1 pod", gone, ""), notified.append)
    assert notified == [
        "waiting: the server does not answer; retrying",
        "waiting: internal error; retrying",
        "waiting: 1 pod",
        "waiting: the server does not answer; retrying",
    ]


def test_the_timeout_holds_while_the_api_server_is_away() -> None:
    gone = [KubernetesError("the server does not answer")] * 100
    with pytest.raises(TimedOutError, match="timed out after 1 min 00 s; still waiting: the server does not answer"):
        Clock().poller(60).wait(answering("2 pods", *gone), lambda _: None)


@pytest.mark.parametrize(
    "error",
    [RefusedError("expired", 401), RefusedError("another certificate"), NotFoundError("no pods", 404)],
    ids=lambda error: str(error),
)
def test_errors_that_do_not_heal_end_the_wait(error: KubernetesError) -> None:
    with pytest.raises(type(error), match=str(error)):
        Clock().poller(None).wait(answering("1 pod", error), lambda _: None)
