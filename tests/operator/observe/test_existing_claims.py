"""Lookups of the claims that jobs and services name: how often the API server is asked, and what its errors do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

import pytest
from aiohttp import web

from spotune_operator.observe.existing_claims import SECOND_LOOKUP_SECONDS, ExistingClaims
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.support.scenarios import NOW

ASK_AGAIN = 60.0
CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims/"


@dataclass(frozen=True)
class Job:
    """What the lookups need to know of a job or service."""

    uid: str = "uid-1"
    generation: int = 1
    key: tuple[str, str] = ("team", "job")


JOB = Job()


@dataclass
class Bench:
    """The lookups against an API server, with a clock that tests advance."""

    server: ApiServer
    claims: ExistingClaims
    names: Sequence[str] = ("data",)
    now: float = NOW

    async def missing(self, job: Job = JOB, *, exist: bool = False, after: float = 0.0) -> Sequence[str] | None:
        self.now += after
        return await self.claims.missing(job, lambda: self.names, exist=exist)

    @property
    def asked(self) -> list[str]:
        """Names of the claims that the API server was asked about."""
        paths = self.server.asked("GET")
        assert all(path.startswith(CLAIMS) for path in paths)
        return [path.removeprefix(CLAIMS) for path in paths]

    def has_claims(self, *, found: bool) -> None:
        self.server.named["persistentvolumeclaims"] = {"metadata": {"name": "data"}} if found else None

    def fails(self, status: int) -> None:
        async def refuse(_request: web.Request) -> web.Response:
            return web.json_response({"message": "no"}, status=status)

        self.server.instead["GET persistentvolumeclaims"] = refuse


def with_api_server(test: Callable[[Bench], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        async with api_server() as (server, kube):
            bench = Bench(server, ExistingClaims(kube, ASK_AGAIN, lambda: bench.now))
            await test(bench)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_claim_that_exists_is_looked_up_once() -> None:
    async def test(bench: Bench) -> None:
        bench.has_claims(found=True)
        for _ in range(5):
            assert await bench.missing(after=1000.0) == ()
        assert bench.asked == ["data"]

    with_api_server(test)


def test_a_missing_claim_is_looked_up_again_now_and_then() -> None:
    async def test(bench: Bench) -> None:
        for _ in range(5):
            assert await bench.missing(after=1.0) == ("data",)
        assert bench.asked == ["data"]
        assert await bench.missing(after=SECOND_LOOKUP_SECONDS) == ("data",)
        assert await bench.missing(after=ASK_AGAIN - 1.0) == ("data",)
        assert bench.asked == ["data"] * 2
        bench.has_claims(found=True)
        assert await bench.missing(after=1.0) == ()
        assert bench.asked == ["data"] * 3

    with_api_server(test)


def test_the_missing_ones_of_several_claims_are_named() -> None:
    async def test(bench: Bench) -> None:
        async def only_data(request: web.Request) -> web.Response:
            return web.json_response({}, status=200 if request.path.endswith("/data") else 404)

        bench.server.instead["GET persistentvolumeclaims"] = only_data
        bench.names = ("data", "nope")
        assert await bench.missing() == ("nope",)

    with_api_server(test)


def test_nothing_is_asked_about_what_names_no_claim_or_runs() -> None:
    async def test(bench: Bench) -> None:
        assert await bench.missing(exist=True) == ()
        bench.names = ()
        assert await bench.missing() == ()
        assert bench.asked == []

    with_api_server(test)


def test_pods_on_nodes_show_that_a_missing_claim_was_made() -> None:
    async def test(bench: Bench) -> None:
        assert await bench.missing() == ("data",)
        bench.fails(500)
        assert await bench.missing(exist=True, after=1.0) == ()
        assert bench.asked == ["data"]

    with_api_server(test)


@pytest.mark.parametrize("changed", [replace(JOB, generation=2), replace(JOB, uid="uid-2")], ids=["spec", "uid"])
def test_the_claim_of_a_changed_job_is_looked_up_at_once(changed: Job) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.missing() == ("data",)
        bench.has_claims(found=True)
        assert await bench.missing(changed) == ()

    with_api_server(test)


def test_a_claim_deleted_after_the_loss_of_all_pods_is_noticed() -> None:
    async def test(bench: Bench) -> None:
        bench.has_claims(found=True)
        assert await bench.missing() == ()
        assert await bench.missing(exist=True) == ()
        bench.has_claims(found=False)
        assert await bench.missing() == ("data",)

    with_api_server(test)


@pytest.mark.parametrize("status", [403, 429, 500])
def test_an_error_of_the_api_server_leaves_what_was_known(status: int) -> None:
    async def test(bench: Bench) -> None:
        bench.fails(status)
        assert await bench.missing() is None
        assert await bench.missing(after=1.0) is None
        assert bench.asked == ["data"], "errors are not repeated at each reconcile"
        bench.server.instead.clear()
        assert await bench.missing(after=ASK_AGAIN) == ("data",)
        bench.fails(status)
        assert await bench.missing(after=ASK_AGAIN) == ("data",)

    with_api_server(test)
