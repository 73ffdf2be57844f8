"""Carries out what is decided about nodes that have lost GPUs; does nothing unless a step is allowed."""

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
    leaves_on_drain,
)
from spotune_operator.kube.client import NODES, PODS, Kube
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import detect
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS: Final = 15.0


class Healer:
    """Looks at all nodes now and then, and when one has changed.

    Args:
        kube: The API server.
        caches: Where the nodes are known from.
        settings: Which steps may be taken.
        clock: Unix time.
    """

    def __init__(self, kube: Kube, caches: Caches, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._kube = kube
        self._caches = caches
        self._settings = settings
        self._clock = clock
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """A node has changed."""
        self._woken.set()

    async def run(self) -> None:
        """Heal until cancelled; at once idle where no step is allowed."""
        await self._caches.synced()
        while self._settings.healing.steps:
            for action in self._actions():
                try:
                    await self._act(action)
                except KubernetesError as error:
                    logger.warning("node %s: %s; once more in a while", action.node, error)
            self._woken.clear()
            try:
                await asyncio.wait_for(self._woken.wait(), _LOOK_EVERY_SECONDS)
            except TimeoutError:
                continue

    def _actions(self) -> list[Action]:
        return heal_gpus(list(self._caches.nodes().values()), {}, self._settings.healing, self._clock())

    async def _act(self, action: Action) -> None:
        node = self._caches.nodes().get(action.node)
        if node is None:
            return
        logger.warning("node %s has lost GPUs: %s", node.name, type(action).__name__)
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
        """Delete the plugin's pod on the node; its DaemonSet makes another, which looks for the GPUs again."""
        labels = detect([node.provider_id]).device_plugin_labels
        for label in labels:
            found = await self._kube.pods_of(labels=f"{label.key}={label.value}", fields=f"spec.nodeName={node.name}")
            for pod in found:
                metadata = pod["metadata"]
                await self._kube.delete(PODS, metadata["namespace"], metadata["name"], metadata["uid"])
            if found:
                return
        logger.warning("node %s: no pod of a device plugin has any of the labels %s", node.name, labels)

    async def _drain(self, node: NodeView) -> None:
        for pod in await self._kube.pods_of(fields=f"spec.nodeName={node.name}"):
            metadata = pod["metadata"]
            if leaves_on_drain(pod) and not await self._kube.evict(metadata["namespace"], metadata["name"]):
                logger.info("pod %s/%s may not be disrupted yet", metadata["namespace"], metadata["name"])
