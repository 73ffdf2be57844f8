"""A job in a queue finds the number of workers that the queue has quota for, and keeps asking for more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune_operator.kueue.partial_admission import (
    PATIENCE_SECONDS,
    SETTLED_SECONDS,
    QueueRequest,
    next_change,
    next_request,
    withdrawn,
)

COUNT, MINIMUM = 8, 2


@dataclass(frozen=True)
class Pod:
    name: str
    held_back: bool = False
    created: float = 0.0


def pods(admitted: int, waiting: int = 0) -> list[Pod]:
    return [
        *(Pod(f"admitted-{number}") for number in range(admitted)),
        *(Pod(f"waiting-{number}", held_back=True, created=float(number)) for number in range(waiting)),
    ]


def request_after(asked: int, seconds: float, admitted: int, waiting: int = 0, *, suspended: bool = False) -> int:
    previous = QueueRequest(asked, 1000.0)
    workers = pods(admitted, waiting)
    return next_request(previous, workers, COUNT, MINIMUM, 1000.0 + seconds, suspended=suspended).workers


def test_first_request_is_for_all() -> None:
    assert next_request(None, [], COUNT, MINIMUM, 5.0, suspended=False) == QueueRequest(COUNT, 5.0)


@pytest.mark.parametrize(
    ("asked", "seconds", "admitted", "waiting", "expected"),
    [
        (8, PATIENCE_SECONDS - 1, 2, 6, 8),  # Kueue may still decide
        (8, PATIENCE_SECONDS, 2, 6, 5),
        (5, PATIENCE_SECONDS, 2, 3, 3),
        (3, 10_000, 2, 1, 3),  # the request for one more stays in the queue
        (8, PATIENCE_SECONDS, 0, 8, 4),
        (3, PATIENCE_SECONDS, 0, 3, 2),
        (2, 10_000, 0, 2, 2),  # never below the minimum
        (4, SETTLED_SECONDS - 1, 4, 0, 4),
        (4, SETTLED_SECONDS, 4, 0, 8),  # all is admitted: ask for the rest
        (4, 10_000, 2, 0, 4),  # the pods do not exist yet
        (8, 10_000, 8, 0, 8),
        (12, 0, 3, 0, 8),  # the job was changed to fewer workers
        (4, 10_000, 2, 2, 3),  # one of three was lost: its replacement waits behind the request for a fourth
    ],
)
def test_next_request(asked: int, seconds: float, admitted: int, waiting: int, expected: int) -> None:
    assert request_after(asked, seconds, admitted, waiting) == expected


def test_preempted_job_asks_for_fewer_until_it_is_admitted() -> None:
    asked = [8]
    while asked[-1:] != asked[-2:-1]:
        asked.append(request_after(asked[-1], PATIENCE_SECONDS, admitted=0, suspended=True))
    assert asked == [8, 4, 2, 2]


def test_smaller_request_deletes_the_newest_of_the_pods_that_wait() -> None:
    assert withdrawn(pods(2, 3), 3) == ["waiting-1", "waiting-2"]
    assert withdrawn(pods(2, 3), 5) == []
    assert withdrawn(pods(3, 1), 1) == ["waiting-0"], "workers that train are never named"


def test_next_change_is_when_a_limit_passes() -> None:
    request = QueueRequest(4, 100.0)
    assert next_change(request, [], 100.0) == SETTLED_SECONDS
    assert next_change(request, [], 115.0) == PATIENCE_SECONDS - 15.0
    assert next_change(request, [], 131.0) is None
    assert next_change(request, [Pod("new", held_back=True, created=130.0)], 131.0) == PATIENCE_SECONDS - 1.0


def test_replacements_of_lost_workers_get_time_to_be_admitted() -> None:
    request, lost_at = QueueRequest(4, 0.0), 1000.0
    workers = [*pods(2), Pod("new-0", held_back=True, created=lost_at), Pod("new-1", held_back=True, created=lost_at)]
    for seconds, expected in ((5.0, 4), (PATIENCE_SECONDS, 3)):
        found = next_request(request, workers, COUNT, MINIMUM, lost_at + seconds, suspended=False)
        assert found.workers == expected


class Queue:
    """A queue that admits a larger request as a whole, or not at all, as Kueue does with slices of an elastic job."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self.admitted = 0
        self.request: QueueRequest | None = None
        self.now = 0.0

    def step(self) -> None:
        """Let Kueue decide, then the operator, ten seconds later."""
        asked = self.request.workers if self.request is not None else 0
        if asked <= self.quota:
            self.admitted = asked
        self.now += 10.0
        workers = pods(self.admitted, max(0, asked - self.admitted))
        self.request = next_request(self.request, workers, COUNT, MINIMUM, self.now, suspended=False)

    def run(self, until: Callable[[], bool], seconds: float = 1000.0) -> float:
        """Run until a condition holds; returns how long that took, infinite if it never does."""
        began = self.now
        while not until():
            if self.now - began > seconds:
                return math.inf
            self.step()
        return self.now - began


@given(st.integers(MINIMUM, COUNT + 3), st.integers(MINIMUM, COUNT + 3))
def test_job_gets_what_the_queue_has_and_grows_when_it_has_more(quota: int, later: int) -> None:
    queue = Queue(quota)
    assert queue.run(lambda: queue.admitted == min(quota, COUNT)) <= 300
    for _ in range(50):
        queue.step()
        assert queue.admitted == min(quota, COUNT), "a pending request takes nothing away"
    assert queue.request is not None
    assert queue.request == QueueRequest(min(quota + 1, COUNT), queue.request.since)
    queue.quota = max(quota, later)
    assert queue.run(lambda: queue.admitted == min(queue.quota, COUNT)) <= 300


@given(st.integers(0, MINIMUM - 1))
def test_job_below_its_minimum_waits_in_the_queue(quota: int) -> None:
    queue = Queue(quota)
    queue.run(lambda: False, seconds=300)
    assert queue.request is not None
    assert (queue.admitted, queue.request.workers) == (0, MINIMUM)
