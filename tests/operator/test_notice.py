"""A spot node that the cloud reclaims: its workers are deleted gracefully, and no other pods are."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from spotune_operator.manager import Manager
from spotune_operator.observe.nodes import NodeView, node_view
from spotune_operator.settings import Settings
from tests.operator.support.api_server import api_server
from tests.operator.support.scenarios import training_scenario

AHEAD = "Preempt Scheduled: Wed, 26 Feb 2025 10:13:13 GMT. DurationInSeconds: -1.  For more information, see <docs>."
NOW = "Preempt Started. For more information, see <docs>."
SETTINGS = Settings(host="127.0.0.1", port=0, image="spotune/trainer:1", debounce_seconds=0.0, heed_preemption=True)
JOB = {
    "apiVersion": "spotune.dev/v1alpha1",
    "kind": "FinetuneJob",
    "metadata": {"name": "job", "namespace": "team", "uid": "uid-1", "generation": 1, "resourceVersion": "5"},
    "spec": {
        "model": {"source": "model", "task": "seq2seq"},
        "dataset": {"train": {"source": "shards"}},
        "training": {"epochs": 1},
        "cluster": {"provider": "none"},
        "storage": {"existingClaim": "data"},
    },
}


def raw_node(name: str, *conditions: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "creationTimestamp": "2026-11-21T10:00:00Z", "resourceVersion": "6"}
    ready = {"type": "Ready", "status": "True"}
    return {"metadata": metadata, "spec": {}, "status": {"conditions": [ready, *conditions]}}


def raw_pod(name: str, component: str, node: str) -> dict[str, Any]:
    labels = {"spotune.dev/job": "job", "app.kubernetes.io/component": component}
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": labels}
    metadata |= {"creationTimestamp": "2026-11-21T10:00:00Z", "resourceVersion": "6"}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": []}, "status": {"phase": "Running"}}


@pytest.mark.parametrize(
    ("condition", "status", "message", "reclaimed"),
    [
        ("VMEventScheduled", "True", AHEAD, True),
        ("PreemptionScheduled", "True", AHEAD, True),
        ("PreemptionScheduled", "True", NOW, True),
        (
            "PreemptionScheduled",
            "True",
            "SpotRebalanceRecommendation Advisory. For more information, see <docs>.",
            False,
        ),
        ("VMEventScheduled", "True", "Reboot Scheduled: Fri, 06 Dec 2024 18:09:55 GMT. DurationInSeconds: -1.", False),
        ("VMEventScheduled", "True", "Freeze Started. DurationInSeconds: 5.", False),
        ("VMEventScheduled", "False", "VM has no scheduled event", False),
        ("VMEventScheduled", "Unknown", "IMDS query failed, exit code: 28", False),
        ("VMEventScheduled", "False", AHEAD, False),
        ("KubeletProblem", "True", AHEAD, False),
    ],
)
def test_only_a_preemption_event_marks_a_node_as_reclaimed(
    condition: str, status: str, message: str, reclaimed: bool
) -> None:
    raw = raw_node("n1", {"type": condition, "status": status, "message": message})
    assert node_view(raw).reclaimed is reclaimed


def test_workers_on_a_reclaimed_node_are_deleted_once() -> None:
    scenario = training_scenario()
    scenario.settings = replace(scenario.settings, heed_preemption=True)
    first, second = scenario.observed.workers
    elsewhere = replace(second, node="n3")
    head = scenario.observed.head
    assert head is not None
    scenario.observe(pods=(replace(head, node="n2"), first, elsewhere))
    scenario.observe(nodes={"n2": NodeView("n2", reclaimed=True), "n3": NodeView("n3")})
    assert scenario.decide().delete_gracefully == [first]
    coming = replace(first, name="worker-3", phase="Pending")
    scenario.observe(pods=(head, replace(first, deleting_since=scenario.now), elsewhere, coming))
    assert scenario.decide().delete_gracefully == []


def test_workers_on_a_reclaimed_node_stay_unless_the_setting_is_on() -> None:
    scenario = training_scenario()
    scenario.observe(nodes={"n2": NodeView("n2", reclaimed=True)})
    assert scenario.decide().delete_gracefully == []


def test_operator_deletes_the_pod_with_its_own_grace_period() -> None:
    async def test() -> None:
        async with api_server() as (server, kube):
            server.objects["finetunejobs"] = [deepcopy(JOB)]
            server.objects["nodes"] = [
                raw_node("n1"),
                raw_node("n2", {"type": "VMEventScheduled", "status": "True", "message": AHEAD}),
            ]
            server.objects["pods"] = [
                raw_pod("head", "head", "n2"),
                raw_pod("worker-1", "workers", "n1"),
                raw_pod("worker-2", "workers", "n2"),
            ]
            async with Manager(kube, SETTINGS), asyncio.timeout(20):
                while not server.asked("DELETE"):  # noqa: ASYNC110 - a server does not tell what it was asked
                    await asyncio.sleep(0.01)
            assert set(server.asked("DELETE")) == {"/api/v1/namespaces/team/pods/worker-2"}
            (options, *_) = [asked.body for asked in server.server.asked if asked.words.startswith("DELETE")]
            assert options["preconditions"] == {"uid": "uid-worker-2"}
            assert "gracePeriodSeconds" not in options

    asyncio.run(test())
