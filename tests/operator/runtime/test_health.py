"""What the kubelet and Prometheus are told of an operator, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from copy import deepcopy
from typing import Any

import aiohttp
import pytest

from spotune_operator.manager import Running
from spotune_operator.runtime.health import Pages
from spotune_operator.settings import Settings
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.support.local_server import answer, refusal, silence

SETTINGS = Settings(host="127.0.0.1", port=0, image="spotune/trainer:1", settle_seconds=0.0, retry_seconds=0.05)
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


async def read(pages: Pages, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{pages.port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def until(pages: Pages, path: str, status: int) -> str:
    """Wait until a page answers so; its text."""
    async with asyncio.timeout(10):
        while True:
            found, text = await read(pages, path)
            if found == status:
                return text
            await asyncio.sleep(0.01)


async def wait_for(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - a server does not tell what it was asked
            await asyncio.sleep(0.01)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def operating(test: Callable[[ApiServer, Running], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test beside a whole operator; `jobs` are there already, `instead` answers for the API server."""

    async def main() -> None:
        async with api_server() as (server, kube):
            server.objects["finetunejobs"] = deepcopy(options.pop("jobs", []))
            server.instead = options.pop("instead", {})
            async with Running(kube, SETTINGS, **options) as running:
                await test(server, running)

    run(main())


# The pages alone


def test_pages_say_what_they_are_given() -> None:
    sickness, ready = "", False

    async def test() -> None:
        nonlocal sickness, ready
        async with Pages(SETTINGS, lambda: sickness, lambda: ready, lambda: b"some_metric 1\n") as pages:
            assert await read(pages, "/livez") == (200, "ok\n")
            assert await read(pages, "/readyz") == (503, "the caches are being filled\n")
            assert await read(pages, "/metrics") == (200, "some_metric 1\n")
            sickness, ready = "watch of pods ended", True
            assert await read(pages, "/livez") == (503, "watch of pods ended\n")
            assert await read(pages, "/readyz") == (200, "ok\n")
            assert (await read(pages, "/"))[0] == 404

    run(test())


# A whole operator


def test_operator_is_ready_once_it_has_looked_at_everything() -> None:
    may_go_on = asyncio.Event()

    async def test(server: ApiServer, running: Running) -> None:
        async def late(request: Any) -> Any:
            if "watch" not in request.query:
                await may_go_on.wait()
                del server.instead["GET rayclusters"]
            return await server.answer(request)

        server.instead["GET rayclusters"] = late
        assert (await read(running.pages, "/readyz"))[0] == 503
        assert (await read(running.pages, "/livez"))[0] == 200
        await asyncio.sleep(0.1)
        assert (await read(running.pages, "/readyz"))[0] == 503
        assert server.asked("PATCH") == []
        may_go_on.set()
        await until(running.pages, "/readyz", 200)
        assert "spotune_operator_synced 1.0" in (await read(running.pages, "/metrics"))[1]

    operating(test)


def test_operator_is_ready_without_kinds_that_are_not_installed() -> None:
    async def test(_: ApiServer, running: Running) -> None:
        await until(running.pages, "/readyz", 200)

    operating(test, instead={"GET rayclusters": refusal(404, "the server could not find the requested resource")})


def test_list_of_jobs_that_fails_is_asked_for_again() -> None:
    async def test(server: ApiServer, running: Running) -> None:
        await wait_for(lambda: sum("finetunejobs" in path for path in server.asked("GET")) >= 3)
        assert (await read(running.pages, "/readyz"))[0] == 503
        assert (await read(running.pages, "/livez"))[0] == 200
        server.instead.clear()
        await until(running.pages, "/readyz", 200)

    operating(test, instead={"GET finetunejobs": refusal(500, "etcd leader changed")})


def test_jobs_that_were_there_before_are_worked_on_and_counted() -> None:
    async def test(server: ApiServer, running: Running) -> None:
        await until(running.pages, "/readyz", 200)
        await wait_for(lambda: any("rayclusters" in path for path in server.asked("PATCH")))
        kinds = [path.split("/")[-2] for path in server.asked("PATCH")]
        assert kinds == ["job", "configmaps", "networkpolicies", "rayclusters"], "what is remembered is said first"
        metrics = (await read(running.pages, "/metrics"))[1]
        assert 'spotune_operator_jobs{phase="Provisioning"} 1.0' in metrics
        assert 'spotune_operator_api_calls_total{kind="configmaps",verb="PATCH"} 1.0' in metrics
        assert 'spotune_operator_reconciles_total{result="ok"} 1.0' in metrics

    operating(test, jobs=[JOB])


@pytest.mark.parametrize("name", ["watch of pods", "pass 0"])
def test_operator_whose_task_has_died_is_not_alive(name: str) -> None:
    async def test(_: ApiServer, running: Running) -> None:
        await until(running.pages, "/readyz", 200)
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == name]
        task.cancel()
        assert name in await until(running.pages, "/livez", 503)

    operating(test)


def test_operator_whose_pass_hangs_is_not_alive() -> None:
    async def test(_: ApiServer, running: Running) -> None:
        assert await until(running.pages, "/livez", 503) == "the pass over team/job hangs\n"

    operating(test, jobs=[JOB], instead={"PATCH configmaps": silence}, longest_pass_seconds=0.2)


def test_a_mistake_in_one_pass_ends_neither_the_operator_nor_the_work_on_other_jobs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(server: ApiServer, running: Running) -> None:
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
        assert (await read(running.pages, "/livez"))[0] == 200
        assert 'spotune_operator_reconciles_total{result="error"}' in (await read(running.pages, "/metrics"))[1]

    other = {**JOB, "metadata": {**METADATA, "name": "other", "uid": "uid-2"}}
    with caplog.at_level("ERROR"):
        operating(test, jobs=[JOB, other])
    assert "the pass failed; once more in" in caplog.text
