"""A ModelService that a job did not create is never taken over: the reconciler against an API server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from spotune_operator.observe.caches import Caches
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.reconciler import Reconciler
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.support.scenarios import CLASSES, NOW, a_cluster_job

SETTINGS = Settings(image="spotune/trainer:1", serving=True)
KEY = ("default", "job")


def trained_job() -> dict[str, Any]:
    """A trained FinetuneJob with `spec.serving`, as the API server has it."""
    body = a_cluster_job(serving={}).model_dump(mode="json", exclude_unset=True)
    condition = {
        "type": "Complete",
        "status": "True",
        "reason": "Trained",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"phase": "Complete", "conditions": [condition], "trained": {"epochs": 3}}
    metadata = {"namespace": KEY[0], "name": KEY[1], "uid": "uid-job", "resourceVersion": "1", "generation": 1}
    return {**body, "metadata": metadata, "status": status}


def existing_service(owner: str) -> dict[str, Any]:
    owners = [{"kind": "FinetuneJob", "name": "x", "uid": owner, "controller": True}] if owner else []
    return {"metadata": {"namespace": KEY[0], "name": KEY[1], "uid": "uid-s", "ownerReferences": owners}, "spec": {}}


async def reconciled(existing: dict[str, Any] | None) -> tuple[ApiServer, dict[str, Any]]:
    """The API server after two reconciles, and the condition `Served`."""
    async with api_server() as (server, kube):
        server.named["modelservices"] = existing
        storage_class = CLASSES["shared"] | {"metadata": {"name": "shared", "uid": "uid-class"}}
        server.objects |= {"finetunejobs": [trained_job()], "storageclasses": [storage_class]}
        async with Poller(SETTINGS, lambda _: None, lambda: NOW) as poller:
            caches = Caches(kube, SETTINGS, lambda _: None, lambda _: None)
            tasks = [asyncio.create_task(reflector.run()) for reflector in caches.reflectors()]
            await caches.synced()
            caches.put_job(server.objects["finetunejobs"][0])
            reconciler = Reconciler(kube, caches, poller, SETTINGS, Metrics(), lambda: NOW)
            for _ in range(2):
                await reconciler.reconcile(KEY)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        conditions = server.objects["finetunejobs"][0]["status"]["conditions"]
        (served,) = [each for each in conditions if each["type"] == "Served"]
        return server, served


@pytest.mark.parametrize("owner", ["", "uid-of-another-job"])
def test_service_of_somebody_else_is_named_and_left_alone(owner: str) -> None:
    server, served = asyncio.run(reconciled(existing_service(owner)))
    assert not [path for path in server.asked("PATCH") if "modelservices" in path]
    assert (served["status"], served["reason"]) == ("False", "Refused")
    assert served["message"].startswith("spec.serving.name: a ModelService job exists")


@pytest.mark.parametrize("existing", [None, existing_service("uid-job")], ids=["free", "of the job"])
def test_service_is_applied_under_a_free_name_and_repaired_under_its_own(existing: dict[str, Any] | None) -> None:
    server, served = asyncio.run(reconciled(existing))
    assert [path for path in server.asked("PATCH") if "modelservices" in path]
    assert served["reason"] == "Creating"
