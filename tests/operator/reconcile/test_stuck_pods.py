"""Neither a failed request nor an invalid spec keeps pods on lost nodes: the reconciler against an API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from spotune.units.timestamps import rfc3339
from spotune_operator.errors import KubernetesError
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.reconciler import Reconciler
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.support.local_server import LocalServer, answer, failure, local_server
from tests.operator.support.scenarios import CLASSES, NOW, a_cluster_job

KEY = ("default", "job")
SETTINGS = Settings(image="spotune/trainer:1")
FORCED = "/api/v1/namespaces/default/pods/worker"


def a_job(count: int) -> dict[str, Any]:
    body = a_cluster_job().model_dump(mode="json", exclude_unset=True)
    body["spec"]["workers"]["count"] = count
    metadata = {"namespace": KEY[0], "name": KEY[1], "uid": "uid-job", "resourceVersion": "1", "generation": 1}
    return {**body, "metadata": metadata, "status": {}}


def a_pod(name: str, component: str, node: str, **metadata: Any) -> dict[str, Any]:
    """A running pod. It has no hash of its template, so it counts as outdated: its job has to stop."""
    labels = {"spotune.dev/job": KEY[1], "app.kubernetes.io/component": component}
    found = {"name": name, "namespace": KEY[0], "uid": f"uid-{name}", "labels": labels, "resourceVersion": "6"}
    found |= {"creationTimestamp": "2026-11-21T10:00:00Z", **metadata}
    status = {"phase": "Running", "podIP": "127.0.0.1"}
    return {"metadata": found, "spec": {"nodeName": node, "containers": []}, "status": status}


def run(test: Callable[[Reconciler, ApiServer, LocalServer], Awaitable[None]], count: int = 2) -> None:
    """Run a test with a job whose head is to stop, and with a worker that is stuck on a node that is gone."""

    async def main() -> None:
        supervising = local_server(answer({}))
        async with api_server() as (server, kube), supervising as supervisor:
            stuck = {"deletionTimestamp": rfc3339(NOW - 600), "deletionGracePeriodSeconds": 30}
            server.objects |= {
                "finetunejobs": [a_job(count)],
                "pods": [a_pod("head", "head", "n1"), a_pod("worker", "workers", "n2", **stuck)],
                "storageclasses": [CLASSES["shared"] | {"metadata": {"name": "shared", "uid": "uid-class"}}],
            }
            port = int(supervisor.url.rpartition(":")[2])
            async with Poller(SETTINGS, lambda _: None, lambda: NOW, port) as poller:
                caches = Caches(kube, SETTINGS, lambda _: None, lambda _: None)
                tasks = [asyncio.create_task(reflector.run()) for reflector in caches.reflectors()]
                await caches.synced()
                caches.put_job(server.objects["finetunejobs"][0])
                await test(Reconciler(kube, caches, poller, SETTINGS, Metrics(), lambda: NOW), server, supervisor)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("failing", ["PATCH configmaps", "PATCH rayclusters", "DELETE pods"])
def test_a_failed_request_keeps_no_other_from_its_work(failing: str) -> None:
    async def test(reconciler: Reconciler, server: ApiServer, supervisor: LocalServer) -> None:
        applied: list[str] = []

        async def apply_slowly(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.2)
            applied.append(request.path)
            body = {"metadata": {"uid": "uid-of-a-policy", "resourceVersion": "8"}}
            return web.json_response(body)

        server.instead |= {"DELETE pods": answer({}), "PATCH networkpolicies": apply_slowly}
        server.instead[failing] = failure(500, "the webhook does not answer")
        with pytest.raises(KubernetesError, match="the webhook does not answer"):
            await reconciler.reconcile(KEY)
        assert FORCED in server.asked("DELETE")
        assert any("rayclusters" in path for path in server.asked("PATCH"))
        assert any(request.words == "POST /stop" for request in supervisor.asked)
        assert applied, "the error is raised when all requests are answered"

    run(test)


def test_a_job_with_an_invalid_spec_is_not_left_with_stuck_pods() -> None:
    async def test(reconciler: Reconciler, server: ApiServer, supervisor: LocalServer) -> None:
        server.instead["DELETE pods"] = answer({})
        assert await reconciler.reconcile(KEY), "the next stuck pod causes no event"
        assert server.objects["finetunejobs"][0]["status"]["phase"] == "Stalled"
        assert server.asked("DELETE") == [FORCED]
        assert all("finetunejobs" in path for path in server.asked("PATCH")), "nothing is applied"
        assert not any("stop" in request.words for request in supervisor.asked)

    run(test, count=0)
