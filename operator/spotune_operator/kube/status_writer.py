"""Writes the status of a custom resource after the Events for its changes; without a change it writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from spotune.job import FinetuneJobStatus
from spotune.service import ModelServiceStatus
from spotune.sweep import FinetuneSweepStatus
from spotune_operator.errors import KubernetesError, NotFoundError
from spotune_operator.kube.client import EVENTS, Manifest, Resource
from spotune_operator.kube.merge_patch import merge_patch
from spotune_operator.kube.phase_change import OnPhaseChange, PhaseChange, ignore, reason_of

logger = logging.getLogger(__name__)


class Server(Protocol):
    """Patches and creates objects; implemented by ``Kube``."""

    async def patch(
        self, resource: Resource, namespace: str, name: str, changes: Manifest, subresource: str = ""
    ) -> Manifest:
        """Merge changes into an object; returns the object afterwards."""

    async def create(self, resource: Resource, manifest: Manifest) -> bool:
        """Create an object; returns False if one of this name exists."""


class CachedObject(Protocol):
    """A custom resource in a cache."""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""

    @property
    def uid(self) -> str:
        """Its uid."""

    @property
    def version(self) -> int:
        """Its ``resourceVersion``."""

    @property
    def status(self) -> Mapping[str, Any]:
        """The status of the API server; empty before the first reconcile."""


Object = TypeVar("Object", bound=CachedObject)
PhasedStatus = FinetuneJobStatus | FinetuneSweepStatus | ModelServiceStatus
Status = TypeVar("Status", bound=PhasedStatus)


class StatusWriter(Generic[Object, Status]):
    """Writes statuses of one kind of custom resources.

    Args:
        server: The API server.
        resource: The kind.
        events: The ``v1.Event``s for an object whose status changes from the second argument to the third.
        written: Called with the object that the API server returned.
        phase_changed: Called after a status with another phase was written.
    """

    def __init__(
        self,
        server: Server,
        resource: Resource,
        events: Callable[[Object, Status, Status], Iterable[Manifest]],
        written: Callable[[Manifest], None],
        phase_changed: OnPhaseChange = ignore,
    ) -> None:
        self._server = server
        self._resource = resource
        self._events = events
        self._written = written
        self._phase_changed = phase_changed

    async def write(self, cached: Object, previous: Status, status: Status) -> bool:
        """Write a status that has changed, after the Events for its changes.

        Args:
            cached: The object in the cache that the new status was decided on.
            previous: Its status, as this version parses it.
            status: Its new status.

        Returns:
            Whether the object still exists.

        Raises:
            ConflictError: The object has changed since, for example by an operator that succeeds this one.
            KubernetesError: The API server failed.
        """
        content = _content(status)
        missing = {name: content[name] for name in content.keys() - cached.status.keys()}
        changes = merge_patch(_content(previous), content) | missing
        if not changes:
            return True
        for event in self._events(cached, previous, status):
            await self._create(event)
        try:
            metadata = {"uid": cached.uid, "resourceVersion": str(cached.version)}
            patch = {"metadata": metadata, "status": changes}
            written = await self._server.patch(self._resource, *cached.key, patch, "status")
        except NotFoundError:
            return False
        self._written(written)
        if "phase" in changes and content["phase"] != previous.phase:
            self._phase_changed(_phase_change(self._resource, cached, previous.phase, status, written))
        return True

    async def _create(self, event: Manifest) -> None:
        """Create an Event. If the API server limits or refuses it, it is left out: nothing else may wait for it."""
        try:
            await self._server.create(EVENTS, event)
        except KubernetesError as error:
            if not error.status:  # it is unreachable
                raise
            logger.warning("an Event is left out: %s", error)


def _phase_change(
    resource: Resource, cached: CachedObject, previous: str, status: PhasedStatus, written: Manifest
) -> PhaseChange:
    namespace, name = cached.key
    return PhaseChange(
        kind=resource.kind,
        namespace=namespace,
        name=name,
        uid=cached.uid,
        version=str(written["metadata"]["resourceVersion"]),
        previous=previous,
        phase=status.phase,
        message=reason_of(status.phase, status.conditions),
        step=getattr(status, "step", None),
        total_steps=getattr(status, "total_steps", None),
        output=getattr(status, "output", ""),
    )


def _content(status: BaseModel) -> dict[str, Any]:
    content: dict[str, Any] = status.model_dump(mode="json", exclude_none=True)
    return content
