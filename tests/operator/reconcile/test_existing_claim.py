"""A job that names a claim that does not exist: the reconciler against an API server, before and after it is made."""

from __future__ import annotations

import asyncio
from typing import Any

from spotune_operator.observe.caches import Caches
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.reconciler import Reconciler
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings
from tests.operator.support.api_server import api_server
from tests.operator.support.scenarios import NOW, a_cluster_job

KEY = ("default", "job")
SETTINGS = Settings(image="spotune/trainer:1")
MESSAGE = (
    "spec.storage.existingClaim: there is no PersistentVolumeClaim text-to-sqll in this namespace: create it, or "
    "correct the name"
)


def a_new_job() -> dict[str, Any]:
    body = a_cluster_job(storage={"existingClaim": "text-to-sqll"}).model_dump(mode="json", exclude_unset=True)
    metadata = {"namespace": KEY[0], "name": KEY[1], "uid": "uid-job", "resourceVersion": "1", "generation": 1}
    return {**body, "metadata": metadata}


def test_a_job_is_stalled_while_its_claim_is_missing_and_continues_once_it_exists() -> None:
    async def main() -> None:
        now = NOW
        async with api_server() as (server, kube), Poller(SETTINGS, lambda _: None, lambda: now) as poller:
            server.objects["finetunejobs"] = [a_new_job()]
            caches = Caches(kube, SETTINGS, lambda _: None, lambda _: None)
            tasks = [asyncio.create_task(reflector.run()) for reflector in caches.reflectors()]
            await caches.synced()
            caches.put_job(server.objects["finetunejobs"][0])
            reconciler = Reconciler(kube, caches, poller, SETTINGS, Metrics(), lambda: now)

            async def reconcile() -> dict[str, Any]:
                """Reconcile after the time that the last one asked for; returns the conditions."""
                nonlocal now
                now += await reconciler.reconcile(KEY) or 0.0
                status = server.objects["finetunejobs"][0]["status"]
                return {each["type"]: each for each in status["conditions"]} | {"phase": status["phase"]}

            found = await reconcile()
            assert found["phase"] == "Stalled"
            for name, status in (("StorageReady", "False"), ("Stalled", "True")):
                of = found[name]
                assert (of["status"], of["reason"], of["message"]) == (status, "ClaimNotFound", MESSAGE)
            assert any("rayclusters" in path for path in server.asked("PATCH")), "its pods start as soon as they can"
            server.named["persistentvolumeclaims"] = {"metadata": {"name": "text-to-sqll"}}
            found = await reconcile()
            assert (found["phase"], found["Stalled"]["status"]) == ("Provisioning", "False")
            assert (found["StorageReady"]["status"], found["StorageReady"]["reason"]) == ("True", "ExistingClaim")
            lookups = [path for path in server.asked("GET") if path.endswith("/persistentvolumeclaims/text-to-sqll")]
            assert len(lookups) == 2
            events = [request.body for request in server.server.asked if request.words.startswith("POST")]
            assert ("Warning", "ClaimNotFound", MESSAGE) in [(e["type"], e["reason"], e["message"]) for e in events]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))
