"""The poller, against real HTTP servers in the place of supervisors: good ones, and all kinds of bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

from spotune_operator.observe.state import JobKey
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.observe.supervisor_status import Reading
from spotune_operator.settings import Settings
from tests.operator.support.local_server import Answer, LocalServer, answer, local_server, refusal, silence, stream

KEY = ("team", "job")
IP = "127.0.0.1"
FAST = Settings(poll_seconds=0.01, start_poll_seconds=0.01, answer_seconds=0.25)
TRAINING = {"phase": "Training", "step": 3, "supervisor": {"state": "running"}}
NOW = 1_800_000_000.0


@dataclass
class Watched:
    """A poller that asks one server, and what was known each time that it told of news.

    A shared machine may be slower than a poller's patience now and then: a test asks for no more than that news are
    news, and that what it waits for comes.
    """

    poller: Poller
    server: LocalServer
    told: list[Reading] = field(default_factory=list)
    ip: str = IP

    def on_news(self, key: JobKey) -> None:
        if key == KEY:
            self.told.append(self.reading)

    def told_nothing_twice(self) -> bool:
        """Whether something was new each time."""
        return not any(_says_the_same(before, after) for before, after in pairwise(self.told))

    @property
    def reading(self) -> Reading:
        found = self.poller.watch(KEY, self.ip)
        assert found is not None
        return found

    async def until(self, holds: Callable[[Reading], bool]) -> Reading:
        """Wait until the reading is as wanted."""
        async with asyncio.timeout(10):
            while not holds(self.reading):  # noqa: ASYNC110 - nobody is told of news that are none
                await asyncio.sleep(0.005)
        return self.reading

    async def asked_again(self, times: int = 3) -> None:
        """Wait for some more polls."""
        before = len(self.server.asked)
        async with asyncio.timeout(10):
            while len(self.server.asked) < before + times:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def watched(*answers: Answer, settings: Settings = FAST) -> AsyncIterator[Watched]:
    async with local_server(*answers) as server:
        port = int(server.url.rpartition(":")[2])
        poller = Poller(settings, lambda key: now.on_news(key), lambda: NOW, port)
        now = Watched(poller, server)
        async with poller:
            poller.watch(KEY, IP)
            yield now


def _says_the_same(before: Reading, after: Reading) -> bool:
    is_silent = before.failing_since is not None, after.failing_since is not None
    return (
        is_silent[0] == is_silent[1]
        and (before.answer is None) == (after.answer is None)
        and (before.said.says_the_same(after.said))
    )


async def a_failure(poller: Poller, ip: str) -> Reading:
    """What is known once a supervisor has not answered."""
    async with asyncio.timeout(10):
        while True:
            reading = poller.watch(KEY, ip)
            if reading is not None and reading.failing_since is not None:
                return reading
            await asyncio.sleep(0.005)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_an_answer_is_a_reading_and_news_are_told_once() -> None:
    async def test() -> None:
        async with watched(answer(TRAINING | {"etaSeconds": 9.0})) as now:
            reading = await now.until(lambda seen: seen.answer is not None)
            assert (reading.said.step, reading.at, reading.failing_since) == (3, NOW, None)
            now.server.says(answer(TRAINING | {"etaSeconds": 8.0, "heartbeat": 2, "unheard": ["of"]}))
            await now.until(lambda seen: seen.said.eta_seconds == 8.0)
            now.server.says(answer(TRAINING | {"step": 4}))
            await now.until(lambda seen: seen.said.step == 4)
            await now.asked_again()
            assert now.told[-1].said.step == 4
            assert now.told_nothing_twice()
            assert {asked.words for asked in now.server.asked} == {"GET /progress"}

    run(test())


def test_nobody_is_known_to_say_anything_before_the_first_answer() -> None:
    async def test() -> None:
        async with watched(silence) as now:
            assert now.reading == Reading()
            assert now.poller.watch(("team", "other"), "") is None

    run(test())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (silence, "TimeoutError"),
        (stream(b'{"phase": "Tra', silent=True), "TimeoutError"),
        (stream(b'{"phase": "Tra', cut=True), "does not answer"),
        (refusal(500, "broken"), "it says 500"),
        (refusal(404, "another program"), "it says 404"),
        (answer("<html>"), "does not answer"),
        (answer(""), "does not answer"),
        (answer("[1, 2]"), "its answer is not a JSON object"),
        (answer("null"), "its answer is not a JSON object"),
        (answer("[" * 100_000), "its answer is nested too deeply"),
        (answer('{"step": ' + "9" * 10_000 + "}"), "does not answer"),
        (stream(*[b" " * 60_000] * 20), "its answer does not end"),
        (answer(status=302, Location="http://127.0.0.1:1/elsewhere"), "it says 302"),
    ],
    ids=[
        "silent",
        "halting",
        "cut",
        "500",
        "404",
        "html",
        "empty",
        "list",
        "null",
        "deep",
        "digits",
        "huge",
        "redirect",
    ],
)
def test_a_bad_answer_is_said_once_and_the_last_good_one_stays(bad: Answer, words: str) -> None:
    async def test() -> None:
        async with watched(answer(TRAINING)) as now:
            await now.until(lambda seen: seen.answer is not None)
            now.server.says(bad)
            failing = await now.until(lambda seen: seen.failing_since is not None)
            assert failing.failing_since == NOW
            assert words in failing.error
            assert (failing.said.step, failing.said.supervisor.state) == (3, "running")
            await now.asked_again(1)
            now.server.says(answer(TRAINING))
            well = await now.until(lambda seen: seen.failing_since is None)
            assert well.error == ""
            silences = [reading.failing_since is not None for reading in now.told]
            assert silences[-3:] == [False, True, False]
            assert now.told_nothing_twice()

    run(test())


def test_an_answer_may_come_in_pieces() -> None:
    pieces = [b'{"phase": "Training", "mess', b'age": "' + b"x" * 70_000, b'", "step": 5}']

    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.02)
        return response

    async def test() -> None:
        async with watched(in_pieces) as now:
            assert (await now.until(lambda seen: seen.answer is not None)).said.step == 5

    run(test())


def test_a_supervisor_that_is_not_there_is_said_with_its_address() -> None:
    async def test() -> None:
        async with local_server(answer(TRAINING)) as gone:
            port = int(gone.url.rpartition(":")[2])
        async with Poller(FAST, lambda _: None, lambda: NOW, port) as poller:
            reading = await a_failure(poller, IP)
            assert f"the supervisor at http://127.0.0.1:{port} does not answer" in reading.error
            assert reading.answer is None

    run(test())


def test_a_head_without_an_address_is_not_asked_any_more() -> None:
    async def test() -> None:
        async with watched(answer(TRAINING)) as now:
            await now.until(lambda seen: seen.answer is not None)
            assert now.poller.watch(KEY, "") is None
            before = len(now.server.asked)
            await asyncio.sleep(0.1)
            assert len(now.server.asked) <= before + 1
            assert now.poller.watch(KEY, IP) == Reading(), "what an earlier head said is not taken for the new one's"

    run(test())


def test_a_new_head_is_asked_at_its_own_address() -> None:
    async def test() -> None:
        async with watched(answer(TRAINING)) as now:
            await now.until(lambda seen: seen.answer is not None)
            now.ip = "127.0.0.99"
            assert now.reading == Reading()
            before = len(now.server.asked)
            await asyncio.sleep(0.1)
            assert len(now.server.asked) <= before + 1

    run(test())


def test_addresses_of_version_6_are_written_as_urls_have_them() -> None:
    async def test() -> None:
        async with Poller(FAST, lambda _: None, lambda: NOW, 1) as poller:
            assert "http://[::1]:1 " in (await a_failure(poller, "::1")).error

    run(test())


def test_so_many_are_asked_at_a_time_and_a_silent_one_holds_up_none() -> None:
    busy, most, answered = 0, 0, 0

    async def slow(_: web.Request) -> web.StreamResponse:
        nonlocal busy, most, answered
        busy, most = busy + 1, max(most, busy + 1)
        await asyncio.sleep(0.02)
        busy, answered = busy - 1, answered + 1
        return web.json_response(TRAINING)

    async def test() -> None:
        async with watched(slow, settings=replace(FAST, polls=3, poll_seconds=0.05, answer_seconds=20.0)) as now:
            for number in range(2, 20):
                now.poller.watch(("team", f"job-{number}"), IP)
            now.poller.watch(("team", "silent"), "127.0.0.98")
            async with asyncio.timeout(10):
                while answered < 60:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert 1 < most <= 3

    run(test())


# Orders


def test_stop_and_start_are_told_and_the_answer_is_news() -> None:
    state = "running"

    async def supervisor(request: web.Request) -> web.StreamResponse:
        nonlocal state
        if request.method == "POST":
            state = {"/stop": "stopping", "/start": "waiting"}[request.path]
            return web.json_response({"state": state})
        return web.json_response(TRAINING | {"supervisor": {"state": state}})

    async def test() -> None:
        async with watched(supervisor, settings=replace(FAST, stop_seconds=45.0, answer_seconds=20.0)) as now:
            await now.until(lambda seen: seen.answer is not None)
            await now.poller.ask(KEY, "stop")
            assert (now.reading.said.supervisor.state, now.reading.said.step) == ("stopping", 3)
            assert now.told[-1].said.supervisor.state == "stopping"
            await now.poller.ask(KEY, "stop")
            await now.asked_again()
            assert now.told_nothing_twice()
            await now.poller.ask(KEY, "start")
            assert now.reading.said.supervisor.state == "waiting"
            orders = [asked for asked in now.server.asked if asked.words.startswith("POST")]
            assert [asked.words for asked in orders] == ["POST /stop", "POST /stop", "POST /start"]
            assert orders[0].body == {"seconds": 45.0}

    run(test())


@pytest.mark.parametrize("bad", [silence, refusal(500, "broken"), answer("<html>"), stream(b"{", cut=True)])
def test_an_order_that_is_not_heard_ends_nothing(bad: Answer) -> None:
    async def test() -> None:
        async with watched(answer(TRAINING), settings=replace(FAST, poll_seconds=60.0, answer_seconds=1.0)) as now:
            await now.until(lambda seen: seen.answer is not None)
            now.server.says(bad)
            await now.poller.ask(KEY, "stop")
            assert now.reading.said.supervisor.state == "running"

    run(test())


def test_there_may_be_nobody_to_tell() -> None:
    async def test() -> None:
        async with Poller(FAST, lambda _: None) as poller:
            await poller.ask(KEY, "stop")
            assert poller.watch(KEY, "") is None

    run(test())


def test_nothing_of_a_poller_is_left_when_it_ends() -> None:
    async def test() -> None:
        async with watched(silence) as now:
            now.poller.watch(("team", "other"), IP)
        await asyncio.sleep(0)
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if name.startswith("progress of")]

    run(test())
