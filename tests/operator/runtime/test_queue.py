"""The work queue, on a fake clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spotune_operator.runtime.queue import WorkQueue


@dataclass(eq=False)
class FakeTimer:
    time: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def when(self) -> float:
        return self.time


@dataclass
class Clock:
    """A fake clock with timers."""

    now: float = 0.0
    timers: list[FakeTimer] = field(default_factory=list)

    def call_later(self, seconds: float, call: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(self.now + seconds, call)
        self.timers.append(timer)
        return timer

    def turn(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.waiting() if timer.time <= end]:
            first = min(due, key=lambda timer: timer.time)
            self.timers.remove(first)
            self.now = first.time
            first.call()
        self.now = end

    def waiting(self) -> list[FakeTimer]:
        return [timer for timer in self.timers if not timer.cancelled]


def a_queue(first_wait: float = 1.0, longest_wait: float = 60.0) -> tuple[WorkQueue[str], Clock]:
    clock = Clock()
    return WorkQueue(first_wait, longest_wait, clock.call_later), clock


def take_one(queue: WorkQueue[str]) -> str:
    """The next key, which must be ready."""
    try:
        queue.get().send(None)
    except StopIteration as taken:
        return str(taken.value)
    raise AssertionError("nothing is ready")


def take(queue: WorkQueue[str]) -> list[str]:
    """All ready keys; none of them is finished."""
    return [take_one(queue) for _ in range(len(queue))]


def test_keys_are_returned_in_order_and_once() -> None:
    queue, clock = a_queue()
    for key in ("a", "b", "a", "c", "b"):
        queue.add(key)
    clock.turn(0)
    assert take(queue) == ["a", "b", "c"]


def test_burst_of_events_causes_one_reconcile() -> None:
    queue, clock = a_queue()
    for _ in range(100):
        queue.add("a", 0.1)
        clock.turn(0.0005)
    assert len(queue) == 0
    clock.turn(0.1)
    assert take(queue) == ["a"]
    assert clock.waiting() == []


def test_continuous_events_do_not_delay_the_reconcile() -> None:
    queue, clock = a_queue()
    for _ in range(5):
        queue.add("a", 0.1)
        clock.turn(0.06)
    assert take(queue) == ["a"]


def test_earlier_of_two_times_counts() -> None:
    queue, clock = a_queue()
    queue.add("a", 300)
    queue.add("a", 0.1)
    queue.add("a", 20)
    clock.turn(0.1)
    assert take(queue) == ["a"]
    queue.done("a")
    clock.turn(1000)
    assert len(queue) == 0


def test_key_added_while_worked_on_is_queued_again_afterwards() -> None:
    queue, clock = a_queue()
    queue.add("a")
    clock.turn(0)
    assert take(queue) == ["a"]
    queue.add("a")
    queue.add("a")
    clock.turn(1)
    assert len(queue) == 0, "no other worker may get it meanwhile"
    queue.done("a")
    assert take(queue) == ["a"]
    queue.done("a")
    assert len(queue) == 0


def test_failures_back_off_until_a_success() -> None:
    queue, clock = a_queue(first_wait=1.0, longest_wait=10.0)
    queue.add("a")
    waits = []
    for _ in range(6):
        clock.turn(10.0)
        assert take(queue) == ["a"]
        waits.append(queue.failed("a"))
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    clock.turn(9.9)
    assert len(queue) == 0
    clock.turn(0.2)
    assert take(queue) == ["a"]
    queue.done("a")
    queue.add("a")
    clock.turn(0)
    assert take(queue) == ["a"]
    assert queue.failed("a") == 1.0


def test_no_number_of_failures_is_too_large() -> None:
    queue, clock = a_queue(longest_wait=5.0)
    queue.add("a")
    for _ in range(2000):
        clock.turn(5.0)
        assert take(queue) == ["a"]
        assert queue.failed("a") <= 5.0


def test_event_cuts_a_backoff_short() -> None:
    queue, clock = a_queue(first_wait=30.0)
    queue.add("a")
    clock.turn(0)
    take(queue)
    queue.failed("a")
    queue.add("a", 0.1)
    clock.turn(0.1)
    assert take(queue) == ["a"]


def test_failures_of_one_key_do_not_slow_another_down() -> None:
    queue, clock = a_queue(first_wait=30.0)
    queue.add("a")
    queue.add("b")
    clock.turn(0)
    assert take(queue) == ["a", "b"]
    queue.failed("a")
    queue.done("b")
    queue.add("b")
    clock.turn(1)
    assert take(queue) == ["b"]


def test_waiting_workers_get_one_key_each() -> None:
    """Two keys are added while three workers wait: two get a key each, the third keeps waiting."""

    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue(1.0, 1.0)
        waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.add("a")
        queue.add("b")
        done, pending = await asyncio.wait(waiting, timeout=0.5)
        assert sorted(task.result() for task in done) == ["a", "b"]
        queue.add("c")
        assert await asyncio.wait_for(pending.pop(), 5) == "c"

    asyncio.run(main())


class Passes(RuleBasedStateMachine):
    """For any sequence of additions and results, no key is lost, and no key is worked on twice at the same time.

    A pass too many does no harm: one that was asked for while the key was ready already may come on its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue: WorkQueue[str] = WorkQueue(1.0, 8.0, self.clock.call_later)
        self.working: list[str] = []
        self.wanted: dict[str, float] = {}
        """The time at which the next reconcile of a key is due; None if none is."""

    def _want(self, key: str, seconds: float) -> None:
        due = self.clock.now + seconds
        self.wanted[key] = min(self.wanted.get(key, due), due)

    @rule(key=st.sampled_from("abc"), seconds=st.sampled_from([0.0, 0.1, 5.0]))
    def ask(self, key: str, seconds: float) -> None:
        self.queue.add(key, seconds)
        self._want(key, seconds)

    @rule(seconds=st.sampled_from([0.05, 1.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.turn(seconds)

    @precondition(lambda self: len(self.queue) > 0)
    @rule()
    def begin(self) -> None:
        key = take_one(self.queue)
        assert key not in self.working
        self.wanted.pop(key, None)
        self.working.append(key)

    @precondition(lambda self: self.working)
    @rule()
    def end_well(self) -> None:
        self.queue.done(self.working.pop(0))

    @precondition(lambda self: self.working)
    @rule()
    def fail(self) -> None:
        key = self.working.pop(0)
        self._want(key, self.queue.failed(key))

    @invariant()
    def nothing_is_forgotten(self) -> None:
        due = {key for key, time in self.wanted.items() if time < self.clock.now and key not in self.working}
        assert len(due) <= len(self.queue)

    def teardown(self) -> None:
        self.clock.turn(1000.0)
        for key in self.working:
            self.queue.done(key)
        self.clock.turn(1000.0)
        assert set(take(self.queue)) >= set(self.wanted)


TestPasses = Passes.TestCase
TestPasses.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
