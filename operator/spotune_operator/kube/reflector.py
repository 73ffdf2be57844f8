"""A reflector: a cache of the objects of one kind, filled by a list and kept current by a watch.

kopf's own watches do not report objects that were deleted before they listed again, after a long loss of the
connection, so a lost RayCluster could stay in a cache forever. Here a new list replaces the cache and reports removals.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from spotune_operator.errors import KubernetesError, NotFoundError
from spotune_operator.kube.client import GoneError, Resource

logger = logging.getLogger(__name__)

_WATCH_SECONDS = (240, 360)
"""Range of a watch's duration; random, so that not all watches are renewed at once."""
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_NOT_INSTALLED_SECONDS = 60.0
"""Interval of attempts to list a kind that is not installed."""
_HEALTHY_SECONDS = 5.0
"""A watch that ends sooner without any event is renewed only after a wait."""
_NO_OBJECTS: Mapping[str, Any] = {}

View = TypeVar("View")


class Source(Protocol):
    """Lists and watches objects; implemented by ``Kube``."""

    def pages(
        self, resource: Resource, namespace: str, labels: str
    ) -> AsyncIterator[tuple[Sequence[Mapping[str, Any]], str]]:
        """List all objects, as pages with the version of the list."""

    def watch(
        self, resource: Resource, namespace: str, labels: str, version: str, seconds: int
    ) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Watch changes since a version for a number of seconds, as pairs of event type and object."""


class Reflector(Generic[View]):
    """The objects of one kind, as views in groups.

    Args:
        kube: The API server.
        resource: The kind. While it is not installed, there are no objects.
        view: Makes the view of an object: the fields to keep.
        group: The group of a view; None: the object is ignored.
        changed: Called with the group of every object that is added, changed or removed.
        labels: Label selector.
        namespace: Namespace; empty: all.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        kube: Source,
        resource: Resource,
        view: Callable[[Mapping[str, Any]], View],
        group: Callable[[View], Hashable | None],
        changed: Callable[[Any], None],
        *,
        labels: str = "",
        namespace: str = "",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        self._kube = kube
        self._view = view
        self._group = group
        self._changed = changed
        self._labels = labels
        self._namespace = namespace
        self._sleep = sleep
        self._groups: dict[Hashable, dict[str, View]] = {}
        self._group_of: dict[str, Hashable] = {}
        self._version = ""
        self._has_events = False

    @property
    def version(self) -> int:
        """The ``resourceVersion`` that the cache has reached; 0 before the first list."""
        return int(self._version or 0)

    def of(self, group: Hashable) -> Mapping[str, View]:
        """The views of one group, by uid."""
        return self._groups.get(group, _NO_OBJECTS)

    def all(self) -> Iterable[View]:
        """All views."""
        return (view for members in self._groups.values() for view in members.values())

    async def run(self) -> None:
        """Keep the cache current until cancelled; errors of the API server are retried."""
        now = asyncio.get_running_loop().time
        wait = _FIRST_WAIT_SECONDS
        while True:
            self._has_events, start = False, now()
            has_ended_normally = await self._list_and_watch()
            if self._has_events or now() - start >= _HEALTHY_SECONDS:
                wait = _FIRST_WAIT_SECONDS
                if has_ended_normally:
                    continue
            await self._sleep(wait * random.uniform(0.5, 1.5))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def _list_and_watch(self) -> bool:
        """List, unless the cache has a version, and watch; returns whether the watch ended normally."""
        try:
            if not self._version:
                await self._list()
                self.synced.set()
            await self._watch()
        except GoneError:
            self._version = ""
        except NotFoundError:
            self._clear_uninstalled()
            await self._sleep(_NOT_INSTALLED_SECONDS * random.uniform(0.5, 1.5))
            return True
        except KubernetesError as error:
            logger.warning("watching %s failed: %s", self.resource.plural, error)
            if error.status:  # an error response: its history may differ from the cache, as after a restore of etcd
                self._version = ""
        else:
            return True
        return False

    def _clear_uninstalled(self) -> None:
        """Empty the cache of a kind that is not installed; it counts as synced."""
        if not self.synced.is_set() or self._group_of:
            logger.warning("%s of %s are not installed", self.resource.plural, self.resource.group_version)
        for uid in list(self._group_of):
            self._drop(uid)
        self._version = ""
        self.synced.set()

    async def _list(self) -> None:
        listed: set[str] = set()
        version = ""
        async for items, version_of_list in self._kube.pages(self.resource, self._namespace, self._labels):
            version = version_of_list
            for item in items:
                listed.add(item["metadata"]["uid"])
                self._put(item)
        for uid in self._group_of.keys() - listed:
            self._drop(uid)
        self._version = version

    async def _watch(self) -> None:
        seconds = random.randint(*_WATCH_SECONDS)
        async for kind, item in self._kube.watch(self.resource, self._namespace, self._labels, self._version, seconds):
            self._has_events = True
            self._version = item["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self._drop(item["metadata"]["uid"])
            elif kind != "BOOKMARK":
                self._put(item)

    def _put(self, item: Mapping[str, Any]) -> None:
        metadata = item["metadata"]
        uid = metadata["uid"]
        try:
            view = self._view(item)
            group = self._group(view)
        except Exception:  # one malformed object, which any user can create, must not end the watch
            name = f"{metadata.get('namespace', '')}/{metadata.get('name')}"
            logger.exception("ignoring the malformed %s %s", self.resource.kind, name)
            return
        if uid in self._group_of and self._group_of[uid] != group:
            self._drop(uid)
        if group is None:
            return
        members = self._groups.setdefault(group, {})
        if members.get(uid) != view:
            members[uid] = view
            self._group_of[uid] = group
            self._changed(group)

    def _drop(self, uid: str) -> None:
        group = self._group_of.pop(uid, None)
        if group is None:
            return
        self._groups[group].pop(uid)
        if not self._groups[group]:
            del self._groups[group]
        self._changed(group)
