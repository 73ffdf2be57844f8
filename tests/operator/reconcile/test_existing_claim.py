"""Jobs that name a claim: the reconciler against an API server, before the claim is made and after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from spotune.units.timestamps import rfc3339
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.reconciler import Reconciler
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.support.local_server import failure
from tests.operator.support.scenarios import NOW, a_cluster_job

KEY = ("default", "job")
SETTINGS = Settings(image="spotune/trainer:1")
CLAIM = "text-to-sqll"
MESSAGE = (
    f"spec.storage.existingClaim: there is no PersistentVolumeClaim {CLAIM} in this namespace: create it, or correct "
    "the name"
)


def a_job(phase: str = "", created: float = NOW - 60) -> dict[str, Any]:
    body = a_cluster_job(storage={"existingClaim": CLAIM}).model_dump(mode="json", exclude_unset=True)
    metadata = {"namespace": KEY[0], "name": KEY[1], "uid": "uid-job", "resourceVersion": "1", "generation": 1}
    metadata |= {"creationTimestamp": rfc3339(created)}
    return {**body, "metadata": metadata, "status": {"phase": phase} if phase else {}}


def a_head(node: str) -> dict[str, Any]:
    labels = {"spotune.dev/job": KEY[1], "app.kubernetes.io/component": "head"}
    metadata = {"name": "head", "namespace": KEY[0], "uid": "uid-head", "labels": labels, "resourceVersion": "6"}
    metadata |= {"creationTimestamp": "2026-11-21T10:00:00Z"}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": []}, "status": {"phase": "Running"}}


@dataclass
class Bench:
    """A reconciler of one job, with a clock that goes on to the next reconcile."""

    server: ApiServer
    reconciler: Reconciler
    now: float

    async def reconcile(self) -> dict[str, tuple[str, str, str]]:
        """Reconcile, and wait as long as that asks for; returns status, reason and message of each condition."""
        self.now += await self.reconciler.reconcile(KEY) or 0.0
        conditions = self.server.objects["finetunejobs"][0]["status"]["conditions"]
        return {each["type"]: (each["status"], each["reason"], each["message"]) for each in conditions}

    @property
    def phase(self) -> str:
        return str(self.server.objects["finetunejobs"][0]["status"]["phase"])

    @property
    def lookups(self) -> int:
        return sum(path.endswith(f"/persistentvolumeclaims/{CLAIM}") for path in self.server.asked("GET"))


def with_bench(test: Callable[[Bench], Awaitable[None]], job: dict[str, Any], *pods: dict[str, Any]) -> None:
    async def main() -> None:
        async with api_server() as (server, kube), Poller(SETTINGS, lambda _: None, lambda: bench.now) as poller:
            server.objects |= {"finetunejobs": [job], "pods": [*pods]}
            caches = Caches(kube, SETTINGS, lambda _: None, lambda _: None)
            reconciler = Reconciler(kube, caches, poller, SETTINGS, Metrics(), lambda: bench.now)
            bench = Bench(server, reconciler, NOW)
            tasks = [asyncio.create_task(reflector.run()) for reflector in caches.reflectors()]
            await caches.synced()
            caches.put_job(job)
            await test(bench)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_job_is_stalled_while_its_claim_is_missing_and_continues_once_it_exists() -> None:
    async def test(bench: Bench) -> None:
        found = await bench.reconcile()
        assert bench.phase == "Stalled"
        assert found["StorageReady"] == ("False", "ClaimNotFound", MESSAGE)
        assert found["Stalled"] == ("True", "ClaimNotFound", MESSAGE)
        assert any("rayclusters" in path for path in bench.server.asked("PATCH")), "its pods start as soon as they can"
        bench.server.named["persistentvolumeclaims"] = {"metadata": {"name": CLAIM}}
        found = await bench.reconcile()
        assert (bench.phase, found["Stalled"][0], found["StorageReady"][1]) == (
            "Provisioning",
            "False",
            "ExistingClaim",
        )
        assert bench.lookups == 2
        events = [request.body for request in bench.server.server.asked if request.words.startswith("POST")]
        assert ("Warning", "ClaimNotFound", MESSAGE) in [(e["type"], e["reason"], e["message"]) for e in events]

    with_bench(test, a_job())


def test_a_claim_that_is_applied_with_its_job_may_come_second() -> None:
    async def test(bench: Bench) -> None:
        found = await bench.reconcile()
        assert (bench.phase, found["StorageReady"][1]) == ("Provisioning", "ClaimNotFound")
        await bench.reconcile()
        assert bench.phase == "Stalled"

    with_bench(test, a_job(created=NOW))


def test_a_job_whose_claim_exists_costs_one_request() -> None:
    async def test(bench: Bench) -> None:
        bench.server.named["persistentvolumeclaims"] = {"metadata": {"name": CLAIM}}
        for _ in range(4):
            assert (await bench.reconcile())["StorageReady"][1] == "ExistingClaim"
        assert bench.lookups == 1

    with_bench(test, a_job())


def test_an_operator_without_the_right_to_get_claims_starts_jobs_as_before() -> None:
    async def test(bench: Bench) -> None:
        bench.server.instead["GET persistentvolumeclaims"] = failure(403, "you may not get it")
        assert (await bench.reconcile())["StorageReady"][1] == "ExistingClaim"
        assert bench.phase == "Provisioning"

    with_bench(test, a_job())


@pytest.mark.parametrize(
    ("job", "pods"),
    [(a_job(), [a_head("n1")]), (a_job("Complete"), []), (a_job("Failed"), [])],
    ids=["runs", "complete", "failed"],
)
def test_a_job_that_runs_or_has_ended_is_not_looked_up(job: dict[str, Any], pods: list[dict[str, Any]]) -> None:
    async def test(bench: Bench) -> None:
        assert (await bench.reconcile())["StorageReady"][1] == "ExistingClaim"
        assert bench.lookups == 0

    with_bench(test, job, *pods)
