"""Deletes pods: before the cloud reclaims a node, after one is gone, and those that Ray does not use."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from spotune_operator.kube.client import PODS, Kube

logger = logging.getLogger(__name__)


class ScheduledPod(Protocol):
    """A pod with a node."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def namespace(self) -> str:
        """Its namespace."""

    @property
    def uid(self) -> str:
        """Its uid."""

    @property
    def node(self) -> str:
        """Its node."""


async def delete_gracefully(kube: Kube, pods: Iterable[ScheduledPod]) -> None:
    """Delete pods with their own grace period, because the cloud reclaims their nodes."""
    for pod in pods:
        logger.warning("deleting pod %s: the cloud reclaims its node %s", pod.name, pod.node)
        await kube.delete(PODS, pod.namespace, pod.name, pod.uid)


async def force_delete(kube: Kube, pods: Iterable[ScheduledPod]) -> None:
    """Delete pods without a grace period, because no kubelet will confirm their end."""
    for pod in pods:
        logger.warning("force-deleting pod %s: its node %s is gone or not ready", pod.name, pod.node)
        await kube.delete(PODS, pod.namespace, pod.name, pod.uid, grace_seconds=0)


async def replace_unused(kube: Kube, pods: Iterable[ScheduledPod]) -> None:
    """Delete pods that Ray does not use, with their own grace period; KubeRay creates others."""
    for pod in pods:
        logger.warning("deleting pod %s: Ray places no replica on it, though one waits for a pod", pod.name)
        await kube.delete(PODS, pod.namespace, pod.name, pod.uid)
