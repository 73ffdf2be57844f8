"""Several versions behind one gateway: which one answers, what happens when the list changes, and what is counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from spotune_serve.engine.base import PromptTooLongError
from spotune_serve.gateway.backend import NoReplicaError, Replicas, VersionGoneError
from spotune_serve.gateway.routes.app import create_app
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from spotune_serve.gateway.version import VersionSource
from spotune_serve.gateway.versions import VERSION_HEADER, Versions
from tests.serve.support.gateway_client import read_events, tokens_of
from tests.serve.support.scripted_backend import ScriptedBackend
from tests.serve.support.versions import source

COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "prompt": "x"}
SETTINGS = GatewaySettings(retry_seconds=0, replica_timeout_seconds=0)


class Service:
    """A gateway with versions `old` and `new`, whose answers are their names."""

    def __init__(self, model: ServedModel, client: httpx.AsyncClient, versions: Versions) -> None:
        self.model = model
        self.client = client
        self.versions = versions
        self.old = ScriptedBackend(tokens_of(model, "SELECT 1"))
        self.new = ScriptedBackend(tokens_of(model, "SELECT 2"))

    def sources(self, old: float, new: float, **options: Any) -> list[VersionSource]:
        return [
            source("old", old, self.model, self.old),
            source("new", new, self.model, self.new, **options),
        ]

    async def weigh(self, old: float, new: float, **options: Any) -> None:
        await self.versions.replace(self.sources(old, new, **options))

    async def ask(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.client.post(COMPLETIONS, json={**BODY, **body}, headers=headers)

    async def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/stats")).json()["versions"]
        return found


def run(model: ServedModel, test: Callable[[Service], Awaitable[None]], settings: GatewaySettings = SETTINGS) -> None:
    async def serve() -> None:
        versions = Versions("tiny", settings, poll_seconds=0.001)
        transport = httpx.ASGITransport(create_app(versions))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            service = Service(model, client, versions)
            await service.weigh(50, 50)
            await test(service)

    asyncio.run(asyncio.wait_for(serve(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the conditions have no event
        await asyncio.sleep(0.001)


def counters(stats: dict[str, Any]) -> tuple[int, int, int]:
    return stats["running"], stats["requests"], stats["errors"]


STATES = {"model-1": {"RUNNING": 2, "STARTING": 1}}


@pytest.mark.parametrize(
    ("found", "states", "addresses", "unplaced"),
    [
        (Replicas(STATES, frozenset({"10.0.0.2", "10.0.0.1"}), 61.25), STATES, ["10.0.0.1", "10.0.0.2"], 61.2),
        (Replicas({}), {}, [], 0),
        (None, None, None, 0),
    ],
)
def test_statistics_have_the_replicas(
    found: Replicas | None, states: Any, addresses: list[str] | None, unplaced: float
) -> None:
    async def replicas() -> Replicas | None:
        return found

    async def test() -> Any:
        transport = httpx.ASGITransport(create_app(Versions("tiny", SETTINGS), replicas))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return (await client.get("/stats")).json()

    stats = asyncio.run(test())
    assert (stats["replicas"], stats["replicaAddresses"], stats["unplacedSeconds"]) == (states, addresses, unplaced)


def test_requests_are_divided_by_the_weights(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.weigh(90, 10)
        chosen = Counter(service.versions.choose(f"request-{k}", "tiny").name for k in range(1000))
        assert 53 <= chosen["new"] <= 147, "five standard deviations of the binomial distribution around 100"
        again = Counter(service.versions.choose(f"request-{k}", "tiny").name for k in range(1000))
        assert chosen == again
        await service.weigh(0, 100)
        assert {service.versions.choose(f"request-{k}", "tiny").name for k in range(100)} == {"new"}

    run(chat_model, test)


def test_the_header_names_the_version_that_answered(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        texts = {"old": "SELECT 1", "new": "SELECT 2"}
        seen = set()
        for stream in [False, True] * 20:
            response = await service.ask(stream=stream)
            version = response.headers[VERSION_HEADER]
            if stream:
                events = [json.loads(event) for event in read_events(response.text)[:-1]]
                text = "".join(event["choices"][0]["text"] for event in events)
            else:
                text = response.json()["choices"][0]["text"]
            assert text == texts[version]
            seen.add(version)
        assert seen == set(texts)

    run(chat_model, test)


def test_a_request_can_name_a_version_without_weight(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.weigh(100, 0)
        response = await service.ask(headers={VERSION_HEADER: "new"})
        assert (response.status_code, response.headers[VERSION_HEADER]) == (200, "new")
        unknown = await service.ask(headers={VERSION_HEADER: "newer"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "version_not_found"
        assert "old, new" in unknown.json()["error"]["message"]
        assert VERSION_HEADER not in unknown.headers

    run(chat_model, test)


def test_all_answers_of_a_request_come_from_one_version(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        response = await service.ask(n=20)
        assert len({choice["text"] for choice in response.json()["choices"]}) == 1

    run(chat_model, test)


def test_a_request_stays_with_its_version_when_a_replica_is_lost_and_weights_change(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.weigh(100, 0)
        service.old = ScriptedBackend(tokens_of(chat_model, "SELECT 1"), losses=[3])
        service.old.gate, service.old.gate_at = asyncio.Event(), 2
        await service.versions.replace([source("old", 100, chat_model, service.old, identity="gated")])
        running = asyncio.create_task(service.ask(stream=True))
        await until(lambda: len(service.old.requests) == 1)
        await service.versions.replace([source("new", 100, chat_model, service.new)])
        assert counters((await service.stats())["old"]) == (1, 0, 0)
        service.old.gate.set()
        response = await running
        events = read_events(response.text)
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "SELECT 1"
        assert len(service.old.requests) == 2
        assert service.new.requests == []

    run(chat_model, test, GatewaySettings(retry_seconds=0))


def test_changes_of_weights_under_load_lose_no_stream(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        async def ask_often() -> None:
            for _ in range(50):
                events = read_events((await service.ask(stream=True)).text)
                assert events[-1] == "[DONE]"

        clients = [asyncio.create_task(ask_often()) for _ in range(4)]
        for weight in range(0, 101, 5):
            await service.weigh(100 - weight, weight)
            await asyncio.sleep(0.005)
        await asyncio.gather(*clients)
        stats = await service.stats()
        assert sum(each["requests"] for each in stats.values()) == 200
        assert sum(each["errors"] for each in stats.values()) == 0

    run(chat_model, test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_moves_when_its_version_is_gone(chat_model: ServedModel, stream: bool) -> None:
    async def test(service: Service) -> None:
        service.old.error = VersionGoneError("deleted")
        responses = [await service.ask(stream=stream) for _ in range(20)]
        assert {(each.status_code, each.headers[VERSION_HEADER]) for each in responses} == {(200, "new")}
        assert service.old.requests
        stats = await service.stats()
        assert (counters(stats["old"]), counters(stats["new"])) == ((0, 0, 0), (0, 20, 0))
        service.new.error = VersionGoneError("deleted")
        refused = await service.ask(stream=stream)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("No replica is ready: version ")
        stats = await service.stats()
        assert stats["old"]["errors"] + stats["new"]["errors"] == 1

    run(chat_model, test)


def test_a_request_that_waits_for_a_version_without_replicas_moves_when_it_leaves(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.weigh(100, 0)
        service.old.gate, service.old.gate_at = asyncio.Event(), 0
        waiting = asyncio.create_task(service.ask())
        await until(lambda: len(service.old.requests) == 1)
        service.old.ready = False
        await service.versions.replace([source("new", 100, chat_model, service.new)])
        response = await waiting
        assert response.headers[VERSION_HEADER] == "new"
        assert response.json()["choices"][0]["text"] == "SELECT 2"
        assert service.old.closed == 1

    run(chat_model, test)


def test_a_stream_that_has_begun_ends_with_an_error_that_names_its_version(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        service.old = ScriptedBackend(tokens_of(chat_model, "SELECT 1"), losses=[3] + [0] * 9)
        await service.versions.replace([source("old", 100, chat_model, service.old, identity="loses its replica")])
        error = json.loads(read_events((await service.ask(stream=True)).text)[-1])["error"]
        assert error["code"] == "no_replica"
        assert "version old" in error["message"]
        assert counters((await service.stats())["old"]) == (0, 1, 1)

    run(chat_model, test)


def test_a_version_that_cannot_be_read_leaves_the_others(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.versions.replace([source("old", 100, chat_model, service.old)])
        await until(lambda: not service.versions.leaving)
        await service.weigh(90, 10, error="no tokenizer")
        stats = await service.stats()
        assert (stats["new"]["weight"], stats["new"]["error"], stats["old"]["error"]) == (10, "no tokenizer", "")
        await service.versions.replace([source("new", 100, chat_model, service.new, error="no tokenizer")])
        response = await service.ask()
        assert (response.status_code, response.headers[VERSION_HEADER]) == (200, "old")
        await service.weigh(0, 100)
        assert (await service.ask()).headers[VERSION_HEADER] == "new"
        assert (await service.stats())["new"]["error"] == ""

    run(chat_model, test)


def test_stats_add_up(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.weigh(100, 0)
        for _ in range(3):
            assert (await service.ask()).status_code == 200
        assert (await service.ask(stream=True)).status_code == 200
        for error, status in ((RuntimeError("bug"), 500), (NoReplicaError("all failed"), 503)):
            service.old.error = error
            assert (await service.ask()).status_code == status
        service.old.error = PromptTooLongError("9 tokens do not fit into 8")
        assert (await service.ask()).status_code == 400
        assert (await service.ask(prompt="")).status_code == 400
        assert (await service.ask(model="other")).status_code == 404
        stats = (await service.stats())["old"]
        assert counters(stats) == (0, 6, 2)
        for histogram in (stats["firstTokenSeconds"], stats["tokenSeconds"]):
            assert histogram["count"] == histogram["buckets"]["+Inf"] == 4
            assert list(histogram["buckets"].values()) == sorted(histogram["buckets"].values())
        assert counters((await service.stats())["new"]) == (0, 0, 0)

    run(chat_model, test)


def test_a_request_that_takes_too_long_is_an_error_of_its_version(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.weigh(100, 0)
        service.old.gate, service.old.gate_at = asyncio.Event(), 0
        assert (await service.ask()).status_code == 504
        assert counters((await service.stats())["old"]) == (0, 1, 1)

    run(chat_model, test, GatewaySettings(request_timeout_seconds=0.1))


def test_time_series_of_a_version_go_with_its_last_request(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.ask()
        await service.versions.replace([source("new", 100, chat_model, service.new)])
        await until(lambda: not service.versions.leaving)
        metrics = (await service.client.get("/metrics")).text
        assert 'model_version="new"' in metrics
        assert 'model_version="old"' not in metrics
        assert list(await service.stats()) == ["new"]

    run(chat_model, test)


def test_models_are_listed_once_and_the_service_is_ready_while_a_version_is(chat_model: ServedModel) -> None:
    async def test(service: Service) -> None:
        await service.weigh(10, 90)
        cards = (await service.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["version"]) for card in cards] == [("tiny", "new"), ("polite", "new")]
        service.new.ready = False
        assert (await service.client.get("/healthz")).status_code == 200
        await service.weigh(0, 100)
        assert (await service.client.get("/healthz")).status_code == 503

    run(chat_model, test)
