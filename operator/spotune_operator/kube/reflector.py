"""Caches of what the cluster holds, kept by one list and a watch each; with a label selector on the server's side.

kopf's own watches do not tell what was deleted while they had to list again (after a long break of the connection), so
a lost RayCluster could seem to be there for ever. Here a new list replaces what was known, and says what went.
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
"""A watch is renewed after a time in between, so that not all are renewed at once."""
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_NOT_INSTALLED_SECONDS = 60.0
"""From one look for a kind that the API server does not know to the next."""
_HEALTHY_SECONDS = 5.0
"""A watch that ends before this time without a word is not renewed at once."""
_NO_OBJECTS: Mapping[str, Any] = {}

View = TypeVar("View")


class Source(Protocol):
    """Where objects are listed and watched: ``Kube``."""

    def pages(
        self, resource: Resource, namespace: str, labels: str
    ) -> AsyncIterator[tuple[Sequence[Mapping[str, Any]], str]]:
        """All objects, in pages with the version of the list."""

    def watch(
        self, resource: Resource, namespace: str, labels: str, version: str, seconds: int
    ) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Changes since a version, for so many seconds."""


class Reflector(Generic[View]):
    """All objects of a kind, each as what is needed of it, in groups.

    Args:
        kube: The API server.
        resource: The kind. One that is not installed has no objects until it is.
        view: What is kept of an object.
        group: Which group a view belongs to; None: it is not kept.
        changed: Called with the group of whatever came, changed or went.
        labels: Label selector.
        namespace: Of this namespace only; empty: of all.
        sleep: Waits for so many seconds.
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
        self._heard = False

    @property
    def version(self) -> int:
        """Up to which version everything is known; they grow. 0 while a list is waited for."""
        return int(self._version or 0)

    def of(self, group: Hashable) -> Mapping[str, View]:
        """The views of a group, by uid."""
        return self._groups.get(group, _NO_OBJECTS)

    def all(self) -> Iterable[View]:
        """All views."""
        return (view for members in self._groups.values() for view in members.values())

    async def run(self) -> None:
        """Follow the cluster until cancelled, through every trouble of the API server."""
        now = asyncio.get_running_loop().time
        wait = _FIRST_WAIT_SECONDS
        while True:
            self._heard, start = False, now()
            ended_well = await self._follow()
            if self._heard or now() - start >= _HEALTHY_SECONDS:
                wait = _FIRST_WAIT_SECONDS
                if ended_well:
                    continue
            await self._sleep(wait * random.uniform(0.5, 1.5))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def _follow(self) -> bool:
        """List, unless a version is known, and watch; whether the watch came to its end."""
        try:
            if not self._version:
                await self._list()
                self.synced.set()
            await self._watch()
        except GoneError:
            self._version = ""
        except NotFoundError:
            self._is_not_installed()
            await self._sleep(_NOT_INSTALLED_SECONDS * random.uniform(0.5, 1.5))
            return True
        except KubernetesError as error:
            logger.warning("watching %s: %s", self.resource.plural, error)
            if error.status:  # it was there and said no: what it remembers may be another past than ours
                self._version = ""
        else:
            return True
        return False

    def _is_not_installed(self) -> None:
        """There is nothing of a kind that is not there (any more), and nothing to wait for."""
        if not self.synced.is_set() or self._group_of:
            logger.warning("%s of %s are not installed", self.resource.plural, self.resource.group_version)
        for uid in list(self._group_of):
            self._drop(uid)
        self._version = ""
        self.synced.set()

    async def _list(self) -> None:
        there: set[str] = set()
        version = ""
        async for items, version_of_list in self._kube.pages(self.resource, self._namespace, self._labels):
            version = version_of_list
            for item in items:
                there.add(item["metadata"]["uid"])
                self._put(item)
        for uid in self._group_of.keys() - there:
            self._drop(uid)
        self._version = version

    async def _watch(self) -> None:
        seconds = random.randint(*_WATCH_SECONDS)
        async for kind, item in self._kube.watch(self.resource, self._namespace, self._labels, self._version, seconds):
            self._heard = True
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
        except Exception:  # one odd object, such as any user can make, must not end the watch of all others
            place = f"{metadata.get('namespace', '')}/{metadata.get('name')}"
            logger.exception("%s %s is passed over: it is not as it should be", self.resource.kind, place)
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
