"""The question to Ray Serve's controller: it is asked once at a time, and may hang or fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spotune_serve.deployment.replica_states import ReplicaStates
from spotune_serve.gateway.backend import Replicas

ONE = Replicas({"model-1": {"RUNNING": 1, "STARTING": 1}})
TWO = Replicas({"model-1": {"RUNNING": 2}})


@dataclass
class Controller:
    """A controller that answers once `answers` is set.

    Attributes:
        states: What it answers, or the error that it raises.
        questions: How often it was asked.
    """

    states: Replicas | Exception | None = field(default_factory=lambda: ONE)
    questions: int = 0
    answers: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> Replicas | None:
        self.questions += 1
        assert self.answers.wait(60)
        if isinstance(self.states, Exception):
            raise self.states
        return self.states


@contextmanager
def hanging() -> Iterator[Controller]:
    """A controller that answers at the end of the block, so that no thread stays."""
    controller = Controller()
    try:
        yield controller
    finally:
        controller.answers.set()


def answering() -> Controller:
    controller = Controller()
    controller.answers.set()
    return controller


def test_answer_is_that_of_the_controller_and_holds_for_a_moment() -> None:
    controller, now = answering(), 100.0
    states = ReplicaStates(controller, reuse_seconds=1.0, clock=lambda: now)

    async def test() -> None:
        nonlocal now
        assert list(await asyncio.gather(states(), states(), states())) == [ONE] * 3
        controller.states = TWO
        now = 101.0
        assert await states() == ONE
        assert controller.questions == 1
        now = 101.1
        assert await states() == TWO
        assert controller.questions == 2

    asyncio.run(test())


def test_controller_that_hangs_is_asked_once_and_blocks_no_answer() -> None:
    with hanging() as controller:
        states = ReplicaStates(controller, answer_seconds=0.01, reuse_seconds=0.0)

        async def test() -> None:
            for _ in range(3):
                assert await states() is None
            assert controller.questions == 1
            controller.answers.set()
            async with asyncio.timeout(60):
                while await states() is None:
                    pass
            assert await states() == ONE

        asyncio.run(test())


def test_controller_that_fails_is_asked_again() -> None:
    controller = answering()
    states = ReplicaStates(controller, reuse_seconds=0.0)

    async def test() -> None:
        controller.states = RuntimeError("the head was lost")
        assert await states() is None
        controller.states = None
        assert await states() is None
        controller.states = TWO
        assert await states() == TWO

    asyncio.run(test())


def test_outside_of_a_gateway_nothing_is_known() -> None:
    assert asyncio.run(_ask_ray_serve()) is None


async def _ask_ray_serve() -> Replicas | None:
    return await ReplicaStates()()
