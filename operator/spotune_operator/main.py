"""The operator: kopf's handlers and nothing else. Events in, keys into the queue; start-up and clean-up.

kopf is used without its bookkeeping: only event handlers, so that it writes no annotation, no finalizer and no Event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import kopf

from spotune.crd.definition import GROUP, PLURAL
from spotune_operator.errors import KubernetesError
from spotune_operator.kube.client import JOBS, Kube
from spotune_operator.manager import Running
from spotune_operator.runtime.logs import log_as_json
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)

_LOOK_FOR_DEFINITION_SECONDS = 2.0


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


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps nothing and compares nothing: kopf would copy every job at every event, to find what has changed in it."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def _configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = kopf.MultiProgressStorage([])
    settings.scanning.disabled = True  # what is served is known; no right to see definitions and namespaces is needed
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = 150
    settings.watching.reconnect_backoff = 1.0
    settings.queueing.idle_timeout = 1.0


async def _trouble(kube: Kube) -> str | None:
    """Why there is nothing to watch yet: a definition that comes later would not be noticed by kopf."""
    try:
        is_there = await kube.serves(JOBS)
    except KubernetesError as error:
        return str(error)
    return None if is_there else "FinetuneJobs are not known to the API server: apply manifests/crd.yaml"


async def _run(settings: Settings) -> None:
    async with Kube(login) as kube:
        while (trouble := await _trouble(kube)) is not None:
            logger.warning("%s", trouble)
            await asyncio.sleep(_LOOK_FOR_DEFINITION_SECONDS)
    where: Any = {"namespaces": settings.namespaces} if any(settings.namespaces) else {"clusterwide": True}
    # Without an identity kopf asks for the name of its user, whom an image need not know.
    where["identity"] = "spotune"
    await kopf.operator(registry=registry_of(settings), standalone=True, **where)


def run(settings: Settings) -> None:
    """Run the operator until it is told to go."""
    log_as_json()
    asyncio.run(_run(settings))
