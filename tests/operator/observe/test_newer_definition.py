"""An operator whose definitions are newer than itself, as in the seconds of an upgrade: against an API server."""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy
from typing import Any

import pytest

from spotune.job import FinetuneJobStatus
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.newer_definition import parse_status
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.reconcile.reconciler import Reconciler
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings
from tests.operator.support.api_server import api_server
from tests.operator.support.scenarios import CLASSES, NOW, Scenario, a_cluster_job

KEY = ("default", "job")
OTHER_DEFAULTS = Settings(image="spotune/trainer:2", ray_version="9.9.9")


def running_job() -> dict[str, Any]:
    """A FinetuneJob that this version has reconciled, as the API server has it."""
    scenario = Scenario(a_cluster_job())
    status = scenario.decide().status.model_dump(mode="json", exclude_none=True)
    body = scenario.job.model_dump(mode="json", exclude_unset=True)
    metadata = {"namespace": KEY[0], "name": KEY[1], "uid": "uid-job", "resourceVersion": "1", "generation": 1}
    return {**body, "metadata": metadata, "status": status}


async def reconcile(job: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Paths of the applied children, and the status after two reconciles by an operator with other defaults."""
    async with api_server() as (server, kube):
        storage_class = CLASSES["shared"] | {"metadata": {"name": "shared", "uid": "uid-class"}}
        server.objects |= {"finetunejobs": [job], "storageclasses": [storage_class]}
        async with Poller(OTHER_DEFAULTS, lambda _: None, lambda: NOW) as poller:
            caches = Caches(kube, OTHER_DEFAULTS, lambda _: None, lambda _: None)
            tasks = [asyncio.create_task(reflector.run()) for reflector in caches.reflectors()]
            await caches.synced()
            caches.put_job(job)
            reconciler = Reconciler(kube, caches, poller, OTHER_DEFAULTS, Metrics(), lambda: NOW)
            for _ in range(2):  # the second one finds the status of the first
                await reconciler.reconcile(KEY)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        applied = [path for path in server.asked("PATCH") if "finetunejobs" not in path]
        return applied, server.objects["finetunejobs"][0]["status"]


def with_unknown(**sections: Any) -> dict[str, Any]:
    """A running job to which a newer definition has added fields."""
    job = deepcopy(running_job())
    for name, fields in sections.items():
        job["spec"].setdefault(name, {}).update(fields)
    return job


def test_running_job_with_fields_of_a_newer_definition_keeps_its_pods() -> None:
    job = with_unknown(workers={"warp": "auto"}, training={"novel": {"depth": 1}}, hypothesis={"enabled": False})
    applied, status = asyncio.run(reconcile(job))
    assert any("rayclusters" in path for path in applied)
    assert status["phase"] != "Stalled"
    assert status["pinned"] == job["status"]["pinned"]


@pytest.mark.parametrize(
    ("change", "named"), [("edited", "spec.workers.warp"), ("new", "spec.workers.warp"), ("invalid", "workers.count")]
)
def test_what_a_person_may_have_written_is_refused_by_name(change: str, named: str) -> None:
    job = with_unknown(workers={"warp": "fast"})
    if change == "edited":
        job["metadata"]["generation"] = 2
    elif change == "new":
        del job["status"]
    else:
        job["spec"]["workers"]["count"] = 0
    applied, status = asyncio.run(reconcile(job))
    (stalled,) = [each for each in status["conditions"] if each["type"] == "Stalled"]
    assert stalled["status"] == "True"
    assert named in stalled["message"]
    assert not applied


def test_job_whose_pods_depend_on_an_unknown_field_is_left_alone() -> None:
    """The operator alone was rolled back: without the field, it would replace all pods."""
    job = with_unknown(workers={"warp": "fast"})
    job["status"]["pinned"]["inputs"] = "of another version"
    applied, status = asyncio.run(reconcile(job))
    assert status["phase"] == "Stalled"
    assert not applied
    assert status["pinned"] == job["status"]["pinned"]


def test_a_field_of_the_status_that_cannot_be_parsed_does_not_cost_the_job_its_pin() -> None:
    status = running_job()["status"] | {"step": "twelve", "queue": 7}
    parsed = parse_status(FinetuneJobStatus, status)
    assert parsed.pinned is not None
    assert json.loads(parsed.pinned.ray_cluster)["headGroupSpec"]
    assert (parsed.step, parsed.queue) == (0, None)
    assert parsed.conditions
