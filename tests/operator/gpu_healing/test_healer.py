"""The healer before a local API server: what it does to nodes and their pods, and what it logs."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from spotune_operator.gpu_healing.healer import Healer
from spotune_operator.gpu_healing.policy import GPU_HEALING, Healing
from spotune_operator.observe.nodes import PREFIX, NodeView
from spotune_operator.settings import GpuHealing, Settings
from tests.operator.support.api_server import ApiServer, api_server

NOW = 1_800_000_000.0
SETTINGS = Settings(healing=GpuHealing(cordon=True, restart_device_plugin=True, drain=True))
TWO_BUDGETS = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."


def cordoned(name: str, gpus_left: int = 1) -> NodeView:
    """A node that lost one of two GPUs a while ago, and whose device plugin was restarted."""
    healing = Healing(2, "2027-01-15T07:00:00Z", step="restart-device-plugin", at="2027-01-15T07:30:00Z")
    annotations = {f"{PREFIX}cordoned-for": "1 of 2 GPUs left"}
    annotations |= {key: value for key, value in healing.annotation().items() if value is not None}
    return NodeView(name, unschedulable=True, gpu_capacity=2, gpu_allocatable=gpus_left, annotations=annotations)


def pod(name: str) -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name, "uid": name}, "status": {"phase": "Running"}}


async def heal_once(server: ApiServer, kube: Any, *nodes: NodeView) -> list[str]:
    """The paths of the evictions, after one check of these nodes."""

    async def synced() -> None:
        pass

    caches: Any = SimpleNamespace(nodes=lambda: {node.name: node for node in nodes}, synced=synced)
    healer = asyncio.create_task(Healer(kube, caches, SETTINGS, clock=lambda: NOW).run())
    async with asyncio.timeout(20):
        while len(server.asked("PATCH")) < len(nodes):  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
    healer.cancel()
    return server.asked("POST")


def test_a_pod_that_cannot_be_evicted_keeps_neither_other_pods_nor_nodes_from_healing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def evict(request: web.Request) -> web.Response:
        if "/blocked/" in request.path:
            return web.json_response({"message": TWO_BUDGETS}, status=500)
        return web.json_response({})

    async def test() -> None:
        async with api_server() as (server, kube):
            server.objects["pods"] = [pod("blocked"), pod("worker")]
            server.instead["POST pods"] = evict
            patched = heal_once(server, kube, cordoned("n1"), cordoned("n2"))
            assert await patched == 2 * [
                "/api/v1/namespaces/team/pods/blocked/eviction",
                "/api/v1/namespaces/team/pods/worker/eviction",
            ]
            bodies = [each.body for each in server.server.asked if each.words.startswith("PATCH")]
            assert ['"step":"drain"' in body["metadata"]["annotations"][GPU_HEALING] for body in bodies] == [True, True]

    asyncio.run(test())
    warnings = [record.getMessage() for record in caplog.records]
    assert f"pod team/blocked on node n1 cannot be evicted: the API server responded with HTTP 500: {TWO_BUDGETS}" in (
        warnings
    )
    assert "node n1 has only 1 of 2 GPUs left: evicting its pods" in warnings


def test_log_says_that_a_healed_node_is_uncordoned(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with api_server() as (server, kube):
            await heal_once(server, kube, cordoned("n1", gpus_left=2))
            (patch,) = [each.body for each in server.server.asked if each.words.startswith("PATCH")]
            assert patch["spec"] == {"unschedulable": False}

    caplog.set_level(logging.INFO)
    asyncio.run(test())
    assert "node n1 has all of its 2 GPUs again: uncordoning it" in [each.getMessage() for each in caplog.records]
