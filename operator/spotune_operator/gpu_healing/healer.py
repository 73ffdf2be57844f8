"""Executes the actions of ``policy.py`` on nodes that have lost GPUs; idle unless a step is allowed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from spotune_operator.errors import KubernetesError
from spotune_operator.gpu_healing.policy import (
    Action,
    Cordon,
    DeleteNode,
    Drain,
    RestartDevicePlugin,
    Uncordon,
    heal_gpus,
    is_evicted_by_drain,
)
from spotune_operator.kube.client import NODES, PODS, Kube
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import detect
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)

_RESYNC_SECONDS: Final = 15.0


class Healer:
    """Checks all nodes when one changes, and at regular intervals.

    Args:
        kube: The API server.
        caches: The observed nodes.
        settings: The allowed steps.
        clock: Returns Unix time.
    """

    def __init__(self, kube: Kube, caches: Caches, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._kube = kube
        self._caches = caches
        self._settings = settings
        self._clock = clock
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Check all nodes soon: one has changed."""
        self._woken.set()

    async def run(self) -> None:
        """Heal nodes until cancelled; returns at once if no step is allowed."""
        await self._caches.synced()
        while self._settings.healing.steps:
            for action in self._actions():
                try:
                    await self._act(action)
                except KubernetesError as error:
                    logger.warning("healing node %s failed: %s; retrying", action.node, error)
            self._woken.clear()
            try:
                await asyncio.wait_for(self._woken.wait(), _RESYNC_SECONDS)
            except TimeoutError:
                continue

    def _actions(self) -> list[Action]:
        return heal_gpus(list(self._caches.nodes().values()), self._settings.healing, self._clock())

    async def _act(self, action: Action) -> None:
        node = self._caches.nodes().get(action.node)
        if node is None:
            return
        if action.message:
            logger.warning("node %s %s", node.name, action.message)
        if isinstance(action, DeleteNode):
            await self._kube.delete(NODES, "", node.name, node.uid)
            return
        if isinstance(action, RestartDevicePlugin):
            await self._restart_device_plugin(node)
        if isinstance(action, Drain):
            await self._drain(node)
        await self._patch(node, action)

    async def _patch(self, node: NodeView, action: Action) -> None:
        changes: dict[str, Any] = {}
        if action.annotations:
            changes["metadata"] = {"annotations": dict(action.annotations)}
        if isinstance(action, Cordon | Uncordon):
            changes["spec"] = {"unschedulable": isinstance(action, Cordon)}
        if changes:
            await self._kube.patch(NODES, "", node.name, changes)

    async def _restart_device_plugin(self, node: NodeView) -> None:
        """Delete the device plugin's pod on the node; its DaemonSet creates another, which detects the GPUs again."""
        labels = detect([node.provider_id]).device_plugin_labels
        for label in labels:
            found = await self._kube.pods_of(labels=f"{label.key}={label.value}", fields=f"spec.nodeName={node.name}")
            for pod in found:
                metadata = pod["metadata"]
                await self._kube.delete(PODS, metadata["namespace"], metadata["name"], metadata["uid"])
            if found:
                return
        logger.warning("node %s has no device plugin pod with any of the labels %s", node.name, labels)

    async def _drain(self, node: NodeView) -> None:
        """Evict the pods of a node. A pod that cannot be evicted does not keep the others there."""
        for pod in await self._kube.pods_of(fields=f"spec.nodeName={node.name}"):
            if not is_evicted_by_drain(pod):
                continue
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            try:
                if not await self._kube.evict(namespace, name):
                    logger.info("the eviction of pod %s/%s waits for its PodDisruptionBudget", namespace, name)
            except KubernetesError as error:
                if not error.status:  # the API server is unreachable
                    raise
                logger.warning("pod %s/%s on node %s cannot be evicted: %s", namespace, name, node.name, error)
