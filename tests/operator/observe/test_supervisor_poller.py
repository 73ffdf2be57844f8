"""The poller, against real HTTP servers as supervisors, healthy and faulty ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any

import pytest
from aiohttp import web

from spotune_operator.observe.state import JobKey
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.observe.supervisor_status import PollResult
from spotune_operator.settings import Settings
from tests.operator.support.local_server import (
    Answer,
    LocalServer,
    answer,
    failure,
    local_server,
    silence,
    stream,
)

KEY = ("team", "job")
IP = "127.0.0.1"
FAST = Settings(poll_seconds=0.01, start_poll_seconds=0.01, poll_timeout_seconds=0.25)
TRAINING = {"phase": "Training", "step": 3, "supervisor": {"state": "running"}}
NOW = 1_800_000_000.0


@dataclass
class Watched:
    """A poller of one server, with the poll result at each reported change.

    A shared machine may exceed the poller's timeout now and then, so tests only require that each report has a change,
    and that what they wait for happens.
    """

    poller: Poller
    server: LocalServer
    reported: list[PollResult] = field(default_factory=list)
    ip: str = IP

    def on_change(self, key: JobKey) -> None:
        if key == KEY:
            self.reported.append(self.poll)

    def has_no_repeated_report(self) -> bool:
        """Whether every report had a change."""
        return not any(_is_same(before, after) for before, after in pairwise(self.reported))

    @property
    def poll(self) -> PollResult:
        found = self.poller.set_target(KEY, self.ip)
        assert found is not None
        return found

    async def until(self, holds: Callable[[PollResult], bool]) -> PollResult:
        """Wait until the poll result meets a condition."""
        async with asyncio.timeout(10):
            while not holds(self.poll):  # noqa: ASYNC110 - unchanged results are not reported
                await asyncio.sleep(0.005)
        return self.poll

    async def wait_for_polls(self, times: int = 3) -> None:
        """Wait for some more polls."""
        before = len(self.server.asked)
        async with asyncio.timeout(10):
            while len(self.server.asked) < before + times:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def watched(
    *answers: Answer, settings: Settings = FAST, clock: Callable[[], float] = lambda: NOW
) -> AsyncIterator[Watched]:
    async with local_server(*answers) as server:
        port = int(server.url.rpartition(":")[2])
        poller = Poller(settings, lambda key: now.on_change(key), clock, port)
        now = Watched(poller, server)
        async with poller:
            poller.set_target(KEY, IP)
            yield now


def _is_same(before: PollResult, after: PollResult) -> bool:
    is_silent = before.failing_since is not None, after.failing_since is not None
    return (
        is_silent[0] == is_silent[1]
        and (before.response is None) == (after.response is None)
        and (before.progress.same_progress(after.progress))
    )


async def a_failure(poller: Poller, ip: str) -> PollResult:
    """The poll result after the first failed poll."""
    async with asyncio.timeout(10):
        while True:
            poll = poller.set_target(KEY, ip)
            if poll is not None and poll.failing_since is not None:
                return poll
            await asyncio.sleep(0.005)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_response_is_stored_and_changes_are_reported_once() -> None:
    async def test() -> None:
        async with watched(answer(TRAINING | {"etaSeconds": 9.0})) as now:
            poll = await now.until(lambda poll: poll.response is not None)
            assert (poll.progress.step, poll.requested_at, poll.failing_since) == (3, NOW, None)
            now.server.respond_with(answer(TRAINING | {"etaSeconds": 8.0, "heartbeat": 2, "unheard": ["of"]}))
            await now.until(lambda poll: poll.progress.eta_seconds == 8.0)
            now.server.respond_with(answer(TRAINING | {"step": 4}))
            await now.until(lambda poll: poll.progress.step == 4)
            await now.wait_for_polls()
            assert now.reported[-1].progress.step == 4
            assert now.has_no_repeated_report()
            assert {asked.words for asked in now.server.asked} == {"GET /progress"}

    run(test())


def test_poll_result_is_empty_before_the_first_response() -> None:
    async def test() -> None:
        async with watched(silence) as now:
            assert now.poll == PollResult()
            assert now.poller.set_target(("team", "other"), "") is None

    run(test())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (silence, "TimeoutError"),
        (stream(b'{"phase": "Tra', silent=True), "TimeoutError"),
        (stream(b'{"phase": "Tra', cut=True), "does not answer"),
        (failure(500, "broken"), "HTTP 500"),
        (failure(404, "another program"), "HTTP 404"),
        (answer("<html>"), "does not answer"),
        (answer(""), "does not answer"),
        (answer("[1, 2]"), "its response is not a JSON object"),
        (answer("null"), "its response is not a JSON object"),
        (answer("[" * 100_000), "its response is nested too deeply"),
        (answer('{"step": ' + "9" * 10_000 + "}"), "does not answer"),
        (stream(*[b" " * 60_000] * 20), "its response is larger than 1 MiB"),
        (answer(status=302, Location="http://127.0.0.1:1/elsewhere"), "HTTP 302"),
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
def test_bad_response_is_reported_once_and_the_last_good_one_stays(bad: Answer, message: str) -> None:
    async def test() -> None:
        async with watched(answer(TRAINING)) as now:
            await now.until(lambda poll: poll.response is not None)
            now.server.respond_with(bad)
            failing = await now.until(lambda poll: message in poll.error)
            assert failing.failing_since == NOW
            assert (failing.progress.step, failing.progress.supervisor.state) == (3, "running")
            await now.wait_for_polls(1)
            now.server.respond_with(answer(TRAINING))
            well = await now.until(lambda poll: poll.failing_since is None)
            assert well.error == ""
            silences = [poll.failing_since is not None for poll in now.reported]
            assert silences[-3:] == [False, True, False]
            assert now.has_no_repeated_report()

    run(test())


def test_response_may_arrive_in_chunks() -> None:
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
            assert (await now.until(lambda poll: poll.response is not None)).progress.step == 5

    run(test())


def test_error_of_a_missing_supervisor_has_its_address() -> None:
    async def test() -> None:
        async with local_server(answer(TRAINING)) as gone:
            port = int(gone.url.rpartition(":")[2])
        async with Poller(FAST, lambda _: None, lambda: NOW, port) as poller:
            poll = await a_failure(poller, IP)
            assert f"the supervisor at http://127.0.0.1:{port} does not answer" in poll.error
            assert poll.response is None

    run(test())


def test_polling_stops_without_an_address() -> None:
    async def test() -> None:
        async with watched(answer(TRAINING)) as now:
            await now.until(lambda poll: poll.response is not None)
            assert now.poller.set_target(KEY, "") is None
            before = len(now.server.asked)
            await asyncio.sleep(0.1)
            assert len(now.server.asked) <= before + 1
            assert now.poller.set_target(KEY, IP) == PollResult(), (
                "the response of an earlier head is not taken for the new one's"
            )

    run(test())


def test_new_head_is_polled_at_its_own_address() -> None:
    async def test() -> None:
        async with watched(answer(TRAINING)) as now:
            await now.until(lambda poll: poll.response is not None)
            now.ip = "127.0.0.99"
            assert now.poll == PollResult()
            before = len(now.server.asked)
            await asyncio.sleep(0.1)
            assert len(now.server.asked) <= before + 1

    run(test())


def test_ipv6_address_is_in_brackets() -> None:
    async def test() -> None:
        async with Poller(FAST, lambda _: None, lambda: NOW, 1) as poller:
            assert "http://[::1]:1 " in (await a_failure(poller, "::1")).error

    run(test())


def test_polls_are_limited_and_a_silent_supervisor_blocks_no_other() -> None:
    busy, most, answered = 0, 0, 0

    async def slow(_: web.Request) -> web.StreamResponse:
        nonlocal busy, most, answered
        busy, most = busy + 1, max(most, busy + 1)
        await asyncio.sleep(0.02)
        busy, answered = busy - 1, answered + 1
        return web.json_response(TRAINING)

    async def test() -> None:
        async with watched(
            slow, settings=replace(FAST, max_concurrent_polls=3, poll_seconds=0.05, poll_timeout_seconds=20.0)
        ) as now:
            for number in range(2, 20):
                now.poller.set_target(("team", f"job-{number}"), IP)
            now.poller.set_target(("team", "silent"), "127.0.0.98")
            async with asyncio.timeout(10):
                while answered < 60:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert 1 < most <= 3

    run(test())


# Orders


def test_stop_and_start_are_sent_and_their_response_is_stored() -> None:
    state = "running"

    async def supervisor(request: web.Request) -> web.StreamResponse:
        nonlocal state
        if request.method == "POST":
            state = {"/stop": "stopping", "/start": "waiting"}[request.path]
            return web.json_response({"state": state})
        return web.json_response(TRAINING | {"supervisor": {"state": state}})

    async def test() -> None:
        async with watched(supervisor, settings=replace(FAST, stop_seconds=45.0, poll_timeout_seconds=20.0)) as now:
            await now.until(lambda poll: poll.response is not None)
            await now.poller.send_command(KEY, "stop")
            assert (now.poll.progress.supervisor.state, now.poll.progress.step) == ("stopping", 3)
            assert now.reported[-1].progress.supervisor.state == "stopping"
            await now.poller.send_command(KEY, "stop")
            await now.wait_for_polls()
            assert now.has_no_repeated_report()
            await now.poller.send_command(KEY, "start")
            assert now.poll.progress.supervisor.state == "waiting"
            orders = [asked for asked in now.server.asked if asked.words.startswith("POST")]
            assert [asked.words for asked in orders] == ["POST /stop", "POST /stop", "POST /start"]
            assert orders[0].body == {"seconds": 45.0}

    run(test())


def test_response_to_an_earlier_request_does_not_replace_that_of_a_command() -> None:
    """The supervisor answers a poll before it gets the command, and the answer arrives after that of the command."""
    is_late, release, state = asyncio.Event(), asyncio.Event(), "running"

    async def supervisor(request: web.Request) -> web.StreamResponse:
        nonlocal state
        if request.method == "POST":
            state = "stopping"
            return web.json_response({"state": state})
        response = web.json_response(TRAINING | {"supervisor": {"state": state}})
        if state == "running" and is_late.is_set():
            await release.wait()
        return response

    async def test() -> None:
        times = count(int(NOW))
        settings = replace(FAST, poll_timeout_seconds=20.0)
        async with watched(supervisor, settings=settings, clock=lambda: float(next(times))) as now:
            await now.until(lambda poll: poll.response is not None)
            is_late.set()
            await now.wait_for_polls(1)
            await now.poller.send_command(KEY, "stop")
            asked = now.poll.requested_at
            release.set()
            await now.until(lambda poll: poll.requested_at > asked)
            assert [poll.progress.supervisor.state for poll in now.reported] == ["running", "stopping"]

    run(test())


@pytest.mark.parametrize("bad", [silence, failure(500, "broken"), answer("<html>"), stream(b"{", cut=True)])
def test_failed_command_is_ignored(bad: Answer) -> None:
    async def test() -> None:
        async with watched(
            answer(TRAINING), settings=replace(FAST, poll_seconds=60.0, poll_timeout_seconds=1.0)
        ) as now:
            await now.until(lambda poll: poll.response is not None)
            now.server.respond_with(bad)
            await now.poller.send_command(KEY, "stop")
            assert now.poll.progress.supervisor.state == "running"

    run(test())


def test_command_without_a_supervisor_is_ignored() -> None:
    async def test() -> None:
        async with Poller(FAST, lambda _: None) as poller:
            await poller.send_command(KEY, "stop")
            assert poller.set_target(KEY, "") is None

    run(test())


def test_poller_leaves_no_tasks_behind() -> None:
    async def test() -> None:
        async with watched(silence) as now:
            now.poller.set_target(("team", "other"), IP)
        await asyncio.sleep(0)
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if name.startswith("progress of")]

    run(test())
