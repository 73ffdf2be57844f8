"""The poller against gateways that are real HTTP servers on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from spotune_operator.serving.gateway_poller import GatewayPoller
from spotune_operator.serving.gateway_stats import Traffic
from spotune_operator.settings import Settings

KEY = ("team", "answers")
SETTINGS = Settings(poll_seconds=0.05, start_poll_seconds=0.02, poll_timeout_seconds=5.0)
_PATIENCE_SECONDS = 30.0


@dataclass
class Gateway:
    """A gateway that counts requests with a first token after 15 ms.

    Attributes:
        report: What it adds to its response.
        held: Whether responses wait for `go`; they have the report of when they were asked for.
    """

    process: str = "a"
    requests: int = 5
    status: int = 200
    now: float = 1000.0
    report: dict[str, Any] = field(default_factory=lambda: {"replicas": {"model-1": {}}})
    held: bool = False
    changed: list[Any] = field(default_factory=list)
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def stats(self, _request: web.Request) -> web.Response:
        self.polled.set()
        report = self.report
        if self.held:
            self.go.clear()
            await self.go.wait()
        latency = {"count": self.requests, "buckets": {"0.01": 0, "0.02": self.requests, "+Inf": self.requests}}
        version = {"weight": 100, "requests": self.requests, "errors": 1, "running": 2, "firstTokenSeconds": latency}
        body = {"process": self.process, "versions": {"v1": version}} | report
        return web.json_response(body, status=self.status)


def polled(
    check: Callable[[GatewayPoller, Gateway, Callable[[], Awaitable[None]]], Awaitable[None]],
    settings: Settings = SETTINGS,
) -> None:
    """Run a check with a poller and its gateway; its last argument waits for two more polls."""

    async def run() -> None:
        gateway = Gateway()
        application = web.Application()
        application.router.add_get("/stats", gateway.stats)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]

        async def two_polls() -> None:
            for _ in range(2):
                gateway.polled.clear()
                await asyncio.wait_for(gateway.polled.wait(), _PATIENCE_SECONDS)

        try:
            async with GatewayPoller(settings, gateway.changed.append, lambda: gateway.now, port) as poller:
                await check(poller, gateway, two_polls)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def traffic(poller: GatewayPoller, window: object = 1) -> Traffic:
    return poller.traffic(KEY, ["127.0.0.1"], window)


async def answered(poller: GatewayPoller, two_polls: Callable[[], Awaitable[None]]) -> None:
    traffic(poller)
    await two_polls()


def test_requests_count_from_the_last_change_of_weights() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        await answered(poller, two_polls)
        assert traffic(poller).of("v1").requests == 0, "they came before the first poll"
        gateway.requests = 12
        await two_polls()
        assert traffic(poller).of("v1").requests == 7
        assert traffic(poller, window=2).of("v1").requests == 0
        gateway.requests = 15
        await two_polls()
        found = traffic(poller, window=2)
        assert (found.of("v1").requests, found.of("v1").errors, found.running("v1"), found.error) == (3, 0, 2, "")
        assert found.lists("v1", 100)
        assert not found.lists("v1", 50)

    polled(check)


def test_a_restarted_gateway_takes_nothing_away() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        await answered(poller, two_polls)
        gateway.requests = 12
        await two_polls()
        gateway.process, gateway.requests = "b", 1
        await two_polls()
        gateway.requests = 3
        await two_polls()
        assert traffic(poller).of("v1").requests == 9

    polled(check)


def test_a_gateway_that_answers_with_an_error_is_reported() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        gateway.status = 500
        await answered(poller, two_polls)
        assert "HTTP 500" in traffic(poller).error
        gateway.status = 200
        await two_polls()
        assert traffic(poller).error == ""
        assert poller.traffic(KEY, ["127.0.0.1", "127.0.0.1"], 1).error == "1 of 2 gateways have answered"

    polled(check)


def test_the_load_is_that_of_the_last_minute_and_is_published_every_half_minute() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        await answered(poller, two_polls)
        gateway.changed.clear()
        gateway.requests = 5 + 124
        await two_polls()
        gateway.now += 40
        await two_polls()
        found = traffic(poller)
        assert (found.requests_per_second, found.first_token_milliseconds) == (3.1, 15)
        assert gateway.changed == [KEY]
        gateway.requests, gateway.now = 5 + 1000, gateway.now + 20
        await two_polls()
        assert traffic(poller).requests_per_second == 3.1
        gateway.now += 200
        await two_polls()
        gateway.now += 40
        await two_polls()
        assert (traffic(poller).requests_per_second, traffic(poller).first_token_milliseconds) == (0.0, None)

    polled(check)


def test_a_service_without_gateways_is_not_polled() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        await answered(poller, two_polls)
        assert poller.traffic(KEY, [], 1) == Traffic()
        polls = [task for task in asyncio.all_tasks() if task.get_name() == "stats of team/answers"]
        await asyncio.gather(*polls, return_exceptions=True)
        assert [task.cancelled() for task in polls] == [True]

    polled(check)


# Replicas

PODS = [("a", "10:00"), ("b", "10:00")]
RARELY = Settings(poll_seconds=3600.0, start_poll_seconds=0.01, poll_timeout_seconds=30.0)
"""Only a change of pods causes another poll, once all replicas run."""


def states(**counts: int) -> dict[str, Any]:
    return {"replicas": {"model-1": counts}}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the poller has no event
            await asyncio.sleep(0.001)


def replicas(poller: GatewayPoller, pods: Sequence[Hashable] = PODS) -> int | None:
    return poller.traffic(KEY, ["127.0.0.1"], None, pods).running_replicas


def test_number_of_replicas_is_followed_while_they_load_their_model() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        gateway.report = states(STARTING=2)
        assert replicas(poller) is None
        await until(lambda: gateway.changed == [KEY])
        assert replicas(poller) == 0
        gateway.report = states(RUNNING=1, STARTING=1)
        await until(lambda: gateway.changed == [KEY, KEY])
        assert replicas(poller) == 1
        gateway.report = states(RUNNING=2)
        await until(lambda: gateway.changed == [KEY, KEY, KEY])
        assert replicas(poller) == 2

    polled(check, RARELY)


def test_number_does_not_hold_after_a_change_of_pods() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        gateway.report = states(RUNNING=2)
        assert replicas(poller) is None
        await until(lambda: replicas(poller) == 2)
        restarted = [PODS[0], ("b", "10:05")]
        gateway.report = states(RUNNING=1, STARTING=1)
        assert replicas(poller, restarted) is None
        await until(lambda: replicas(poller, restarted) is not None)
        assert replicas(poller, restarted) == 1

    polled(check, RARELY)


def test_response_to_a_poll_from_before_the_change_does_not_count() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        gateway.held, gateway.report = True, states(RUNNING=2)
        assert replicas(poller) is None
        await asyncio.wait_for(gateway.polled.wait(), _PATIENCE_SECONDS)
        restarted = [PODS[0], ("b", "10:05")]
        assert replicas(poller, restarted) is None
        gateway.report = states(RUNNING=1, STARTING=1)
        gateway.polled.clear()
        gateway.go.set()
        await asyncio.wait_for(gateway.polled.wait(), _PATIENCE_SECONDS)
        assert replicas(poller, restarted) is None
        gateway.go.set()
        await until(lambda: replicas(poller, restarted) is not None)
        assert replicas(poller, restarted) == 1
        gateway.held = False
        gateway.go.set()

    polled(check, RARELY)


def test_lost_controller_makes_the_number_unknown() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        gateway.report = states(RUNNING=2)
        assert replicas(poller) is None
        await until(lambda: replicas(poller) == 2)
        for report in ({"replicas": None}, states(RECOVERING=1, RUNNING=1)):
            gateway.report = report
            await until(lambda: replicas(poller) is None)
            assert not poller.traffic(KEY, ["127.0.0.1"], None, PODS).no_replica_report
            gateway.report = states(RUNNING=2)
            await until(lambda: replicas(poller) == 2)

    polled(check)


def test_gateways_of_an_older_image_have_no_report() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        gateway.report = {}
        assert replicas(poller) is None
        await until(lambda: gateway.changed == [KEY])
        found = poller.traffic(KEY, ["127.0.0.1"], None, PODS)
        assert (found.running_replicas, found.no_replica_report) == (None, True)

    polled(check)


def test_gateways_that_never_answer_have_no_report_after_four_intervals() -> None:
    async def check(poller: GatewayPoller, gateway: Gateway, two_polls: Callable[[], Awaitable[None]]) -> None:
        gateway.status = 500
        assert replicas(poller) is None
        await two_polls()
        assert not poller.traffic(KEY, ["127.0.0.1"], None, PODS).no_replica_report
        gateway.now += 5 * SETTINGS.poll_seconds
        await until(lambda: gateway.changed == [KEY])
        assert poller.traffic(KEY, ["127.0.0.1"], None, PODS).no_replica_report

    polled(check)
