"""Jobs and sweeps are deleted after their ttl, and a webhook is told of their end: the operator with an API server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from spotune_operator.manager import Manager
from spotune_operator.settings import Settings
from tests.api.support.sweep_files import a_sweep
from tests.operator.notifications.test_notifier import Receiver, serving
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.support.scenarios import CLASSES, a_cluster_job, training_scenario
from tests.operator.sweeps.scenario import GRID, NOW, SweepScenario, run_to_the_end

ENDED = {"status": "True", "reason": "Trained", "lastTransitionTime": "2026-01-01T00:00:00Z"}


def stored(body: dict[str, Any], status: dict[str, Any], version: str = "5") -> dict[str, Any]:
    """An object as the API server has it."""
    metadata = {"namespace": "default", **body["metadata"], "uid": "u1", "resourceVersion": version, "generation": 1}
    return {**body, "metadata": metadata, "status": status}


async def deleted(server: ApiServer, plural: str, manager: Manager) -> list[dict[str, Any]]:
    """The options of the first deletion that the operator asks for."""
    found: list[dict[str, Any]] = []
    asked = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        found.append({"path": request.path, **json.loads(await request.text())})
        asked.set()
        return web.json_response({})

    server.instead[f"DELETE {plural}"] = answer
    async with manager, asyncio.timeout(8):
        await asked.wait()
    return found


def test_an_ended_job_is_deleted_and_its_end_is_told(tmp_path: Path) -> None:
    async def run() -> tuple[list[dict[str, Any]], Receiver]:
        receiver = Receiver()
        async with api_server() as (server, kube), serving(receiver, tmp_path) as url:
            body = a_cluster_job(ttlSecondsAfterFinished=0).model_dump(mode="json", exclude_unset=True)
            status = {"phase": "Exporting", "conditions": [{"type": "Complete", **ENDED}], "trained": {"epochs": 3}}
            storage_class = CLASSES["shared"] | {"metadata": {"name": "shared", "uid": "uid-class"}}
            server.objects |= {"finetunejobs": [stored(body, status)], "storageclasses": [storage_class]}
            targets = json.dumps([{"name": "hook", "urlFile": str(url)}])
            settings = Settings(port=0, host="127.0.0.1", image="i:1", debounce_seconds=0, notifications=targets)
            return await deleted(server, "finetunejobs", Manager(kube, settings)), receiver

    [request], receiver = asyncio.run(run())
    assert request["path"] == "/apis/spotune.dev/v1alpha1/namespaces/default/finetunejobs/job"
    assert request["preconditions"]["uid"] == "u1"
    assert request["preconditions"]["resourceVersion"]
    assert request["propagationPolicy"] == "Background"
    assert [(body["name"], body["previousPhase"], body["phase"]) for body in receiver.accepted] == [
        ("job", "Exporting", "Complete")
    ]


def test_an_ended_sweep_is_deleted() -> None:
    async def run() -> list[dict[str, Any]]:
        scenario = SweepScenario()
        run_to_the_end(scenario, [2.0, 1.5, 0.5, 3.0, 0.75, 1.0])
        sweep = a_sweep(**GRID, ttlSecondsAfterFinished=60).model_dump(mode="json", exclude_unset=True)
        status = scenario.status.model_dump(mode="json", exclude_none=True)
        async with api_server() as (server, kube):
            server.objects["finetunesweeps"] = [stored(sweep, status)]
            settings = Settings(port=0, host="127.0.0.1", image="i:1", debounce_seconds=0)
            later = max(scenario.now, NOW) + 61
            return await deleted(server, "finetunesweeps", Manager(kube, settings, lambda: later))

    [request] = asyncio.run(run())
    assert request["path"].endswith("/finetunesweeps/t5-search")


def test_a_job_expires_only_after_its_end_and_its_ttl() -> None:
    scenario = training_scenario(ttlSecondsAfterFinished=600)
    assert not scenario.decide(after=100_000).expired
    scenario.supervisor_reports("Done", "trained", step=100)
    first = scenario.decide()
    assert not first.expired
    assert first.requeue_after is not None
    assert first.requeue_after <= 601
    assert not scenario.decide(after=598).expired
    assert scenario.decide(after=3).expired
    scenario.edit(a_cluster_job(training={"epochs": 9, "globalBatchSize": 96}, ttlSecondsAfterFinished=600))
    assert not scenario.decide().expired  # it trains longer


def test_a_ttl_changes_neither_pods_nor_the_job_of_the_trainer() -> None:
    scenario = training_scenario()
    before = {manifest["kind"]: manifest for manifest in scenario.decide().apply}
    scenario.edit(a_cluster_job(ttlSecondsAfterFinished=600))
    after = {manifest["kind"]: manifest for manifest in scenario.decide().apply}
    assert {kind: before[kind] for kind in ("RayCluster", "ConfigMap")} == {
        kind: after[kind] for kind in ("RayCluster", "ConfigMap")
    }


@pytest.mark.parametrize(("given", "message"), [(-1, "ttlSecondsAfterFinished"), (2**31, "ttlSecondsAfterFinished")])
def test_a_ttl_has_a_range(given: int, message: str) -> None:
    with pytest.raises(Exception, match=message):
        a_cluster_job(ttlSecondsAfterFinished=given)
