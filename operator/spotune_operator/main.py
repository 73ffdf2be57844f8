"""The entry point of the operator: kopf's handlers for start-up, clean-up and events of FinetuneJobs.

kopf runs event handlers alone, so that it writes no annotations, no finalizers and no Events.
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
from spotune_operator.kube.client import FINETUNE_JOBS, Kube
from spotune_operator.kube.requirements import RAY, unmet_requirement
from spotune_operator.manager import Manager
from spotune_operator.notifications.targets import parse_targets
from spotune_operator.runtime.logs import log_as_json
from spotune_operator.settings import Settings

logger = logging.getLogger(__name__)

_CRD_POLL_SECONDS = 2.0


def login() -> kopf.ConnectionInfo:
    """Credentials of the pod's service account, or else of the kubeconfig.

    Raises:
        KubernetesError: There are no credentials.
    """
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        raise KubernetesError("no credentials found: run in a pod with a service account, or set KUBECONFIG")
    return found


def build_registry(settings: Settings) -> kopf.OperatorRegistry:
    """Kopf's handlers for an operator with these settings."""
    registry = kopf.OperatorRegistry()
    stack = contextlib.AsyncExitStack()
    memo: dict[str, Manager] = {}

    @kopf.on.login(registry=registry)
    def log_in(**_: Any) -> kopf.ConnectionInfo:
        return login()

    @kopf.on.startup(registry=registry)
    async def start(**kwargs: Any) -> None:
        _configure(kwargs["settings"])
        kube = await stack.enter_async_context(Kube(login))
        memo["manager"] = await stack.enter_async_context(Manager(kube, settings))

    @kopf.on.cleanup(registry=registry)
    async def clean_up(**_: Any) -> None:
        await stack.aclose()

    @kopf.on.event(GROUP, PLURAL, registry=registry)
    async def on_job(event: Mapping[str, Any], **_: Any) -> None:
        memo["manager"].on_job(event["type"], dict(event["object"]))

    return registry


class _NoDiffs(kopf.DiffBaseStorage):
    """Stores nothing: by default kopf copies every job at every event to compute a diff, which is unused here."""

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
    settings.scanning.disabled = True  # the kinds are known, so kopf needs no right to list CRDs and namespaces
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = 150
    settings.watching.reconnect_backoff = 1.0
    settings.queueing.idle_timeout = 1.0


async def startup_problem(kube: Kube) -> str | None:
    """Why the operator cannot start yet, and the remedy: kopf would not notice a CRD that is installed later."""
    try:
        if unmet := unmet_requirement(await kube.document("/version"), await kube.document(f"/openapi/v3/apis/{RAY}")):
            return unmet
        is_served = await kube.serves(FINETUNE_JOBS)
    except KubernetesError as error:
        return str(error)
    return None if is_served else "the API server does not serve FinetuneJobs: apply manifests/crd.yaml"


async def _run(settings: Settings) -> None:
    async with Kube(login) as kube:
        logged = None
        while (problem := await startup_problem(kube)) is not None:
            if problem != logged:
                logger.warning("waiting: %s", problem)
            logged = problem
            await asyncio.sleep(_CRD_POLL_SECONDS)
    scope: Any = {"namespaces": settings.namespaces} if any(settings.namespaces) else {"clusterwide": True}
    # Without an identity, kopf looks up the name of its Unix user, which an image need not have.
    scope["identity"] = "spotune"
    await kopf.operator(registry=build_registry(settings), standalone=True, **scope)


def run(settings: Settings) -> None:
    """Run the operator until it is terminated.

    Raises:
        UsageError: The notifications in the settings are invalid.
    """
    parse_targets(settings.notifications)  # kopf would log an error of a start-up handler and try again, without an end
    log_as_json()
    asyncio.run(_run(settings))
