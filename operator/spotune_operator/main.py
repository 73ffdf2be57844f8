"""The operator: kopf's handlers and nothing else. Events in, keys into the queue; start-up and clean-up.

kopf is used without its bookkeeping: only event handlers, so that it writes no annotation, no finalizer and no Event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import kopf

from spotune.crd.definition import GROUP, PLURAL
from spotune_operator.errors import KubernetesError
from spotune_operator.kube import Kube
from spotune_operator.logs import log_as_json
from spotune_operator.running import Running
from spotune_operator.settings import Settings


def login() -> kopf.ConnectionInfo:
    """Credentials: those of the pod, or else those of the kubeconfig.

    Raises:
        KubernetesError: There are none.
    """
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        raise KubernetesError("no credentials: run in a pod with a service account, or set KUBECONFIG")
    return found


def registry_of(settings: Settings) -> kopf.OperatorRegistry:
    """Handlers of kopf over an operator with these settings."""
    registry = kopf.OperatorRegistry()
    stack = contextlib.AsyncExitStack()
    memo: dict[str, Running] = {}

    @kopf.on.login(registry=registry)
    def log_in(**_: Any) -> kopf.ConnectionInfo:
        return login()

    @kopf.on.startup(registry=registry)
    async def start(**kwargs: Any) -> None:
        _configure(kwargs["settings"])
        kube = await stack.enter_async_context(Kube(login))
        memo["running"] = await stack.enter_async_context(Running(kube, settings))

    @kopf.on.cleanup(registry=registry)
    async def clean_up(**_: Any) -> None:
        await stack.aclose()

    @kopf.on.event(GROUP, PLURAL, registry=registry)
    async def on_job(event: Mapping[str, Any], **_: Any) -> None:
        memo["running"].on_job(event["type"], dict(event["object"]))

    return registry


def _configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False
    settings.scanning.disabled = True  # what is served is known; no right to see definitions and namespaces is needed
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = 150
    settings.watching.reconnect_backoff = 1.0
    settings.queueing.idle_timeout = 1.0


def run(settings: Settings) -> None:
    """Run the operator until it is told to go."""
    log_as_json()
    where: Any = {"namespaces": [settings.watch_namespace]} if settings.watch_namespace else {"clusterwide": True}
    asyncio.run(kopf.operator(registry=registry_of(settings), standalone=True, **where))
