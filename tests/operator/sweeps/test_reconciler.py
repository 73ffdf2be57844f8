"""The operator with an API server: the status is written first, jobs that exist are adopted, and refusals are shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
from aiohttp import web

from spotune.sweep import FinetuneSweepStatus
from spotune_operator.manager import Manager
from spotune_operator.settings import Settings
from spotune_operator.sweeps.caches import CachedSweep
from spotune_operator.sweeps.events import sweep_events
from spotune_operator.sweeps.state import trial_job_view
from tests.api.support.sweep_files import a_sweep
from tests.operator.support.api_server import ApiServer, api_server
from tests.operator.sweeps.scenario import ASHA, GRID, NOW, UID, SweepScenario

SETTINGS = Settings(
    port=0, host="127.0.0.1", image="spotune/trainer:1", debounce_seconds=0.0, rejected_retry_seconds=0.05
)
JOBS = "/apis/spotune.dev/v1alpha1/namespaces/team/finetunejobs"
STATUS = "/apis/spotune.dev/v1alpha1/namespaces/team/finetunesweeps/t5-search/status"


def raw_sweep(**status: Any) -> dict[str, Any]:
    """The sweep of `GRID` as the API server returns it."""
    content = a_sweep(**GRID).model_dump(mode="json", exclude_unset=True)
    metadata = {**content["metadata"], "uid": UID, "resourceVersion": "5", "generation": 1}
    return {**content, "metadata": metadata, "status": status or {"observedGeneration": -1}}


def run_operator(server_has: Callable[[ApiServer], None], until: Callable[[ApiServer], bool]) -> ApiServer:
    """Run the operator against this server until it was asked for something; returns the server."""

    async def test() -> ApiServer:
        async with api_server() as (server, kube):
            server.objects["finetunesweeps"] = [raw_sweep()]
            server_has(server)
            async with Manager(kube, SETTINGS), asyncio.timeout(20):
                await holds(lambda: until(server))
            return server

    return asyncio.run(test())


async def holds(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not condition():  # noqa: ASYNC110 - a server does not tell what it was asked
        await asyncio.sleep(0.01)


def status_of(server: ApiServer) -> dict[str, Any]:
    found: dict[str, Any] = server.objects["finetunesweeps"][0]["status"]
    return found


def stalled_message(server: ApiServer) -> str:
    conditions = {each["type"]: each for each in status_of(server).get("conditions", ())}
    stalled = conditions.get("Stalled", {})
    return str(stalled["message"]) if stalled.get("status") == "True" else ""


def answering(code: int, message: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"message": message, "code": code}, status=code)

    return answer


def test_trials_are_recorded_before_they_are_created() -> None:
    server = run_operator(lambda server: None, lambda server: len(server.asked("POST")) >= 2 + 2)  # two Events
    asked = [each for each in server.server.asked if each.words.split()[0] in ("POST", "PATCH")]
    created = [each for each in asked if each.words == f"POST {JOBS}"]
    assert [each.body["metadata"]["name"] for each in created] == ["t5-search-0", "t5-search-1"]
    first_status = next(number for number, each in enumerate(asked) if each.words == f"PATCH {STATUS}")
    assert first_status < asked.index(created[0])
    assert [trial["name"] for trial in status_of(server)["trials"]] == ["t5-search-0", "t5-search-1"]
    assert status_of(server)["observedGeneration"] == 1


def test_jobs_that_exist_already_are_adopted() -> None:
    scenario = SweepScenario()
    for manifest in scenario.decide().create:
        scenario.create(manifest)

    def server_has(server: ApiServer) -> None:
        for job in scenario.jobs.values():
            metadata = {
                **job["metadata"],
                "resourceVersion": "5",
                "generation": 1,
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
            server.objects.setdefault("finetunejobs", []).append({**job, "metadata": metadata})

    server = run_operator(server_has, lambda server: bool(status_of(server).get("trials")))
    assert [trial["name"] for trial in status_of(server)["trials"]] == ["t5-search-0", "t5-search-1"]
    assert f"{JOBS}" not in server.asked("POST")


def test_a_job_of_somebody_else_is_left_alone_and_named() -> None:
    job = SweepScenario().decide().create[0]
    metadata = {"name": "t5-search-1", "namespace": "team", "uid": "u", "resourceVersion": "5", "generation": 1}

    def server_has(server: ApiServer) -> None:
        server.objects["finetunejobs"] = [
            {**job, "metadata": {**metadata, "creationTimestamp": "2026-01-01T00:00:00Z"}}
        ]

    server = run_operator(server_has, lambda server: bool(stalled_message(server)))
    assert stalled_message(server).startswith("a FinetuneJob t5-search-1 exists that this sweep did not create")
    names = [each.body["metadata"]["name"] for each in server.server.asked if each.words == f"POST {JOBS}"]
    assert set(names) <= {"t5-search-0"}


def test_a_job_of_somebody_else_is_named_if_the_cache_did_not_have_it_yet() -> None:
    job = SweepScenario().decide().create[0]
    metadata = {"name": "t5-search-1", "namespace": "team", "uid": "u", "resourceVersion": "5", "generation": 1}

    async def test() -> str:
        async with api_server() as (server, kube):
            server.objects["finetunesweeps"] = [raw_sweep()]
            server.instead["POST finetunejobs"] = answering(409, "it exists")
            async with Manager(kube, SETTINGS) as manager, asyncio.timeout(20):
                await holds(lambda: JOBS in server.asked("POST"))
                await asyncio.sleep(0.2)  # no event of the sweep itself is left
                other = {**job, "metadata": {**metadata, "creationTimestamp": "2026-01-01T00:00:00Z"}}
                server.objects["finetunejobs"] = [other]
                manager.on_job("ADDED", other)
                await holds(lambda: bool(stalled_message(server)))
            return stalled_message(server)

    assert asyncio.run(test()).startswith("a FinetuneJob t5-search-1 exists that this sweep did not create")


def test_a_refusal_is_shown_and_tried_again() -> None:
    def server_has(server: ApiServer) -> None:
        server.instead["POST finetunejobs"] = answering(403, "exceeded quota: jobs")

    server = run_operator(
        server_has, lambda server: bool(stalled_message(server)) and server.asked("POST").count(JOBS) >= 5
    )
    assert "the API server rejected the FinetuneJob t5-search-0" in stalled_message(server)
    assert "exceeded quota" in stalled_message(server)


def test_a_refused_change_of_a_trial_holds_up_no_other_one() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    changed: list[str] = []

    def server_has(server: ApiServer) -> None:
        server.objects["finetunesweeps"][0]["spec"]["suspend"] = True
        for job in scenario.jobs.values():
            metadata = {"resourceVersion": "5", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
            server.objects.setdefault("finetunejobs", []).append({**job, "metadata": {**job["metadata"], **metadata}})
        server.instead["PATCH finetunejobs"] = patch_job

    async def patch_job(request: web.Request) -> web.StreamResponse:
        name = request.path.rpartition("/finetunejobs/")[2].partition("/")[0]
        body = await request.json()
        if name == "t5-search-0" and "suspend" in body.get("spec", {}):
            return web.json_response({"message": "denied by a webhook", "code": 403}, status=403)
        if "suspend" in body.get("spec", {}):
            changed.append(name)
        return web.json_response(scenario.jobs[name] | {"status": body.get("status", {})})

    server = run_operator(server_has, lambda server: bool(changed) and bool(stalled_message(server)))
    assert set(changed) == {"t5-search-1"}
    assert "the API server rejected the FinetuneJob t5-search-0" in stalled_message(server)
    assert "denied by a webhook" in stalled_message(server)


def has_invalid_sweep(server: ApiServer) -> None:
    parameters = server.objects["finetunesweeps"][0]["spec"]["parameters"]
    parameters["training.learnRate"] = parameters.pop("training.learningRate")


def test_a_sweep_of_an_invalid_spec_says_so_and_creates_nothing() -> None:
    """The API server cannot apply the parameters to the template, so such a sweep may exist."""
    server = run_operator(has_invalid_sweep, lambda server: bool(stalled_message(server)))
    assert stalled_message(server) == ("spec.parameters.training.learnRate: is not a field; did you mean learningRate?")
    assert status_of(server)["phase"] == "Stalled"
    assert JOBS not in server.asked("POST")


@pytest.mark.parametrize(("is_valid", "counted", "other"), [(True, "ok", "stalled"), (False, "stalled", "ok")])
def test_a_reconcile_is_counted_by_its_result(is_valid: bool, counted: str, other: str) -> None:
    async def test() -> None:
        async with api_server() as (server, kube):
            server.objects["finetunesweeps"] = [raw_sweep()]
            if not is_valid:
                has_invalid_sweep(server)
            async with Manager(kube, SETTINGS) as manager, asyncio.timeout(20):

                def number(result: str) -> float | None:
                    name = "spotune_operator_reconciles_total"
                    return manager.metrics.registry.get_sample_value(name, {"result": result})

                while number(counted) is None:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
                assert number(other) is None

    asyncio.run(test())


def test_an_operator_that_may_not_list_sweeps_still_reconciles_jobs() -> None:
    async def test() -> None:
        async with api_server() as (server, kube):
            server.instead["GET finetunesweeps"] = answering(403, "you may not list finetunesweeps")
            async with Manager(kube, SETTINGS) as manager, asyncio.timeout(20):
                while not manager._synced:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
                assert manager.health_problem() == ""

    asyncio.run(test())


def events_between(before: SweepScenario, after: FinetuneSweepStatus) -> list[tuple[str, str, str]]:
    sweep: CachedSweep = CachedSweep.of(raw_sweep())
    found = sweep_events(sweep, before.status, after, NOW)
    return [(event["type"], event["reason"], event["message"]) for event in found]


def test_events_tell_what_happened_to_trials() -> None:
    scenario = SweepScenario(a_sweep(**ASHA))
    first = events_between(scenario, scenario.decide().status)
    assert first[0] == ("Normal", "TrialStarted", "trial t5-search-0: training.seed: 1")
    assert len(first) == 9
    scenario.reconcile()
    scenario.evaluates(0, 100, 1.0)
    scenario.evaluates(1, 100, 2.0)
    scenario.fails(2)
    scenario.completes(3, 0.5)
    found = events_between(scenario, scenario.decide().status)
    assert sorted(found) == [
        ("Normal", "BestChanged", "trial t5-search-3 is the best so far: 0.5"),
        (
            "Normal",
            "TrialPruned",
            "trial t5-search-1: pruned at step 100: loss 2 is not the best one of 2 trials at 100 steps",
        ),
        ("Warning", "TrialFailed", "trial t5-search-2: the loss is not finite"),
    ]
    scenario.reconcile()
    assert events_between(scenario, scenario.decide().status) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"labels": {"spotune.dev/trial": "x"}}, {"number": None}),
        ({"annotations": {"spotune.dev/trial-parameters": "{"}}, {"parameters": None}),
        ({"annotations": {"spotune.dev/trial-parameters": "[1]"}}, {"parameters": None}),
        ({"annotations": None}, {"parameters": None, "suspended_by_sweep": False}),
    ],
    ids=["number", "no-json", "no-mapping", "no-annotations"],
)
def test_edited_labels_and_annotations_do_not_stop_the_operator(
    changes: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    job = deepcopy(dict(SweepScenario().decide().create[0]))
    job["metadata"] |= {"uid": "u", **changes}
    view = trial_job_view(json.loads(json.dumps(job)))
    assert {name: getattr(view, name) for name in expected} == dict(expected)
