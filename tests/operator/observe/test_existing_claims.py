"""Lookups of the claims that jobs name: how often the API server is asked, and what its errors do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiohttp import web

from spotune_operator.observe.caches import CachedJob
from spotune_operator.observe.existing_claims import ExistingClaims
from spotune_operator.observe.state import Pod
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.support.scenarios import NOW

ASK_AGAIN = 60.0
PATH = "/api/v1/namespaces/team/persistentvolumeclaims/data"
PENDING = Pod("head", "team", "uid-h", "job", "head")


def a_job(storage: dict[str, Any] | None = None, phase: str = "", **metadata: Any) -> CachedJob:
    given = {"name": "job", "namespace": "team", "uid": "uid-1", "generation": 1, "resourceVersion": "5"}
    spec = {"storage": {"existingClaim": "data"} if storage is None else storage}
    return CachedJob.of({"metadata": given | metadata, "spec": spec, "status": {"phase": phase}})


@dataclass
class Bench:
    """The lookups against an API server, with a clock that tests advance."""

    server: ApiServer
    claims: ExistingClaims
    now: float = NOW

    async def exists(self, job: CachedJob, *pods: Pod, after: float = 0.0) -> bool | None:
        self.now += after
        return await self.claims.exists(job, pods)

    @property
    def asked(self) -> int:
        assert {*self.server.asked("GET")} <= {PATH}
        return len(self.server.asked("GET"))

    def has_claim(self, *, found: bool) -> None:
        self.server.named["persistentvolumeclaims"] = {"metadata": {"name": "data"}} if found else None

    def fails(self, status: int) -> None:
        async def refuse(_request: web.Request) -> web.Response:
            return web.json_response({"message": "no"}, status=status)

        self.server.instead["GET persistentvolumeclaims"] = refuse


def with_api_server(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with api_server() as (server, kube):
            bench = Bench(server, ExistingClaims(kube, ASK_AGAIN, lambda: bench.now))
            await test(bench)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_claim_that_exists_is_looked_up_once() -> None:
    async def test(bench: Bench) -> None:
        bench.has_claim(found=True)
        for _ in range(5):
            assert await bench.exists(a_job(), PENDING, after=1000.0) is True
        assert bench.asked == 1

    with_api_server(test)


def test_a_missing_claim_is_looked_up_again_now_and_then() -> None:
    async def test(bench: Bench) -> None:
        for _ in range(5):
            assert await bench.exists(a_job(), PENDING, after=1.0) is False
        assert bench.asked == 1
        bench.has_claim(found=True)
        assert await bench.exists(a_job(), PENDING, after=ASK_AGAIN) is True
        assert bench.asked == 2

    with_api_server(test)


def test_a_pod_with_a_node_shows_that_the_claim_exists() -> None:
    async def test(bench: Bench) -> None:
        assert await bench.exists(a_job(), PENDING) is False
        bench.fails(500)
        assert await bench.exists(a_job(), replace(PENDING, node="n1"), after=1.0) is True
        assert bench.asked == 1

    with_api_server(test)


@pytest.mark.parametrize(
    "job",
    [a_job({}), a_job({"size": "1Gi"}), a_job(phase="Complete"), a_job(phase="Failed")],
    ids=["no storage", "own claim", "complete", "failed"],
)
def test_nothing_is_asked_about_a_job_without_a_claim_or_at_its_end(job: CachedJob) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.exists(job) is True
        assert bench.asked == 0

    with_api_server(test)


@pytest.mark.parametrize("change", [{"generation": 2}, {"uid": "uid-2"}], ids=str)
def test_the_claim_of_a_changed_job_is_looked_up_at_once(change: dict[str, Any]) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.exists(a_job()) is False
        bench.has_claim(found=True)
        assert await bench.exists(a_job(**change)) is True

    with_api_server(test)


def test_a_claim_deleted_after_the_loss_of_all_pods_is_noticed() -> None:
    async def test(bench: Bench) -> None:
        bench.has_claim(found=True)
        assert await bench.exists(a_job(), PENDING) is True
        assert await bench.exists(a_job(), replace(PENDING, node="n1")) is True
        bench.has_claim(found=False)
        assert await bench.exists(a_job(), PENDING) is False

    with_api_server(test)


@pytest.mark.parametrize("status", [403, 429, 500])
def test_an_error_of_the_api_server_leaves_what_was_known(status: int) -> None:
    async def test(bench: Bench) -> None:
        bench.fails(status)
        assert await bench.exists(a_job(), PENDING) is None
        assert await bench.exists(a_job(), PENDING, after=1.0) is None
        assert bench.asked == 1, "errors are not repeated at each reconcile"
        bench.server.instead.clear()
        assert await bench.exists(a_job(), PENDING, after=ASK_AGAIN) is False
        bench.fails(status)
        assert await bench.exists(a_job(), PENDING, after=ASK_AGAIN) is False

    with_api_server(test)
