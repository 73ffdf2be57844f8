"""How long somebody waits for a job, and what is said meanwhile."""

import pytest

from spotune_operator.cli.suspend import Patience
from spotune_operator.errors import KubernetesError


class Clock:
    """Time that goes by in pauses only."""

    def __init__(self) -> None:
        self.now = 0.0

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, seconds: float | None) -> Patience:
        return Patience(seconds, lambda: self.now, self.pause)


def test_what_is_missing_is_said_once_for_as_long_as_it_is_the_same() -> None:
    said: list[str] = []
    answers = iter(["2 pods", "2 pods", "1 pod", ""])
    Clock().patience(None).wait(lambda: next(answers), said.append)
    assert said == ["waiting: 2 pods", "waiting: 1 pod"]


def test_nothing_is_said_where_nothing_is_missing() -> None:
    said: list[str] = []
    clock = Clock()
    clock.patience(0).wait(lambda: "", said.append)
    assert (said, clock.now) == ([], 0)


def test_end_of_patience_names_what_is_still_missing() -> None:
    clock = Clock()
    with pytest.raises(KubernetesError, match="waited for 1 min 00 s, and still: 2 pods"):
        clock.patience(60).wait(lambda: "2 pods", lambda _: None)
    assert clock.now == 60
