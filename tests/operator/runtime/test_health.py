"""Probes and metrics of a whole operator, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from copy import deepcopy
from typing import Any

import aiohttp
import pytest

from spotune_operator.manager import Manager
from spotune_operator.runtime.health import HealthServer
from spotune_operator.settings import Settings
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.support.local_server import answer, failure, silence

SETTINGS = Settings(host="127.0.0.1", port=0, image="spotune/trainer:1", debounce_seconds=0.0, retry_seconds=0.05)
METADATA = {"name": "job", "namespace": "team", "uid": "uid-1", "generation": 1, "resourceVersion": "5"}
JOB = {
    "apiVersion": "spotune.dev/v1alpha1",
    "kind": "FinetuneJob",
    "metadata": METADATA,
    "spec": {
        "model": {"source": "model", "task": "seq2seq"},
        "dataset": {"train": {"source": "shards"}},
        "training": {"epochs": 1},
        "cluster": {"provider": "none"},
        "storage": {"existingClaim": "data"},
    },
}


async def read(pages: HealthServer, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{pages.port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def until(pages: HealthServer, path: str, status: int, words: str = "") -> str:
    """Wait until a path responds with this status and these words; returns its text."""
    async with asyncio.timeout(10):
        while True:
            found, text = await read(pages, path)
            if found == status and words in text:
                return text
            await asyncio.sleep(0.01)


async def wait_for(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - a server does not tell what it was asked
            await asyncio.sleep(0.01)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def operating(test: Callable[[ApiServer, Manager], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test beside a whole operator; `jobs` exist already, `instead` has handlers of the API server."""

    async def main() -> None:
        async with api_server() as (server, kube):
            server.objects["finetunejobs"] = deepcopy(options.pop("jobs", []))
            server.named["persistentvolumeclaims"] = {"metadata": {"name": "data"}}
            server.instead = options.pop("instead", {})
            async with Manager(kube, SETTINGS, **options) as manager:
                await test(server, manager)

    run(main())


# The pages alone


def test_health_server_serves_liveness_readiness_and_metrics() -> None:
    health_problem, ready = "", False

    async def test() -> None:
        nonlocal health_problem, ready
        async with HealthServer(SETTINGS, lambda: health_problem, lambda: ready, lambda: b"some_metric 1\n") as pages:
            assert await read(pages, "/livez") == (200, "ok\n")
            assert await read(pages, "/readyz") == (503, "the caches are not filled yet\n")
            assert await read(pages, "/metrics") == (200, "some_metric 1\n")
            health_problem, ready = "watch of pods ended", True
            assert await read(pages, "/livez") == (503, "watch of pods ended\n")
            assert await read(pages, "/readyz") == (200, "ok\n")
            assert (await read(pages, "/"))[0] == 404

    run(test())


# A whole operator


def test_operator_is_ready_once_all_caches_are_filled() -> None:
    may_go_on = asyncio.Event()

    async def test(server: ApiServer, manager: Manager) -> None:
        async def late(request: Any) -> Any:
            if "watch" not in request.query:
                await may_go_on.wait()
                del server.instead["GET rayclusters"]
            return await server.answer(request)

        server.instead["GET rayclusters"] = late
        assert (await read(manager.health_server, "/readyz"))[0] == 503
        assert (await read(manager.health_server, "/livez"))[0] == 200
        await asyncio.sleep(0.1)
        assert (await read(manager.health_server, "/readyz"))[0] == 503
        assert server.asked("PATCH") == []
        may_go_on.set()
        await until(manager.health_server, "/readyz", 200)
        assert "spotune_operator_synced 1.0" in (await read(manager.health_server, "/metrics"))[1]

    operating(test)


def test_operator_is_ready_without_kinds_that_are_not_installed() -> None:
    async def test(_: ApiServer, manager: Manager) -> None:
        await until(manager.health_server, "/readyz", 200)

    operating(test, instead={"GET rayclusters": failure(404, "the server could not find the requested resource")})


def test_failed_list_of_jobs_is_retried() -> None:
    async def test(server: ApiServer, manager: Manager) -> None:
        await wait_for(lambda: sum("finetunejobs" in path for path in server.asked("GET")) >= 3)
        assert (await read(manager.health_server, "/readyz"))[0] == 503
        assert (await read(manager.health_server, "/livez"))[0] == 200
        server.instead.clear()
        await until(manager.health_server, "/readyz", 200)

    operating(test, instead={"GET finetunejobs": failure(500, "etcd leader changed")})


def test_existing_jobs_are_reconciled_and_counted() -> None:
    async def test(server: ApiServer, manager: Manager) -> None:
        await until(manager.health_server, "/readyz", 200)
        await wait_for(lambda: any("rayclusters" in path for path in server.asked("PATCH")))
        kinds = [path.split("/")[-2] for path in server.asked("PATCH")]
        assert kinds == ["job", "configmaps", "networkpolicies", "rayclusters"], "the status comes first"
        metrics = await until(manager.health_server, "/metrics", 200, 'spotune_operator_reconciles_total{result="ok"}')
        assert 'spotune_operator_jobs{phase="Provisioning"} 1.0' in metrics
        assert 'spotune_operator_api_calls_total{kind="configmaps",verb="PATCH"} 1.0' in metrics
        assert 'spotune_operator_reconciles_total{result="ok"} 1.0' in metrics

    operating(test, jobs=[JOB])


@pytest.mark.parametrize("name", ["watch of pods", "reconcile worker 0"])
def test_operator_with_a_dead_task_is_not_live(name: str) -> None:
    async def test(_: ApiServer, manager: Manager) -> None:
        await until(manager.health_server, "/readyz", 200)
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == name]
        task.cancel()
        assert name in await until(manager.health_server, "/livez", 503)

    operating(test)


def test_operator_with_a_hung_reconcile_is_not_live() -> None:
    async def test(_: ApiServer, manager: Manager) -> None:
        assert await until(manager.health_server, "/livez", 503) == "the reconcile of team/job hangs\n"

    operating(test, jobs=[JOB], instead={"PATCH configmaps": silence}, max_reconcile_seconds=0.2)


def test_bug_in_one_reconcile_stops_neither_the_operator_nor_other_jobs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(server: ApiServer, manager: Manager) -> None:
        async def odd(request: Any) -> Any:
            if request.path.endswith("/spotune-job"):
                return await answer(["no", "object"])(request)
            del server.instead["PATCH configmaps"]
            found = await server.answer(request)
            server.instead["PATCH configmaps"] = odd
            return found

        server.instead["PATCH configmaps"] = odd
        await wait_for(lambda: any(path.endswith("/other/status") for path in server.asked("PATCH")))
        await wait_for(lambda: sum(path.endswith("/spotune-job") for path in server.asked("PATCH")) > 1)
        assert (await read(manager.health_server, "/livez"))[0] == 200
        assert 'spotune_operator_reconciles_total{result="error"}' in (await read(manager.health_server, "/metrics"))[1]

    other = {**JOB, "metadata": {**METADATA, "name": "other", "uid": "uid-2"}}
    with caplog.at_level("ERROR"):
        operating(test, jobs=[JOB, other])
    assert "reconcile failed with a bug of the operator; retrying in" in caplog.text
