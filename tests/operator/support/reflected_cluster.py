"""A cluster in a dictionary, and a reflector of it, for the tests of reflectors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spotune_operator.kube.client import PODS, GoneError, Resource
from spotune_operator.kube.reflector import Reflector

Event = tuple[str, Mapping[str, Any]]


def pod(uid: str, group: str | None = "a", **more: Any) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": f"pod-{uid}", "namespace": "team"}, "group": group, **more}


@dataclass
class Cluster:
    """Objects of one kind, with versions and a limited history.

    Attributes:
        objects: By uid.
        page_size: Number of objects in a page.
        errors: Raised by the next lists and watches, one each; None: no error.
        asked: The requests so far: "list", or "watch" with its version.
        between_pages: Called, one each, after the first page of the next lists.
    """

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    page_size: int = 2
    errors: list[Exception | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    between_pages: list[Callable[[], None]] = field(default_factory=list)
    _version: int = 100
    _forgotten: int = 0
    _history: list[tuple[int, Event]] = field(default_factory=list)
    _happened: asyncio.Event = field(default_factory=asyncio.Event)
    _cut: bool = False

    def put(self, *items: dict[str, Any]) -> None:
        for item in items:
            kind = "MODIFIED" if item["metadata"]["uid"] in self.objects else "ADDED"
            self.objects[item["metadata"]["uid"]] = item
            self._note(kind, item)

    def delete(self, uid: str) -> None:
        self._note("DELETED", self.objects.pop(uid))

    def bookmark(self) -> None:
        self._note("BOOKMARK", {"metadata": {}})

    def cut(self, *, forgetting: Sequence[str] = (), adding: Sequence[dict[str, Any]] = ()) -> None:
        """End the running watch; the objects added and removed here are in no watch."""
        self._cut = True
        if forgetting or adding:
            self._version += 1
            self._forgotten = self._version
            self.objects |= {item["metadata"]["uid"]: item for item in adding}
            for uid in forgetting:
                del self.objects[uid]
        self._happened.set()

    def _note(self, kind: str, item: Mapping[str, Any]) -> None:
        self._version += 1
        versioned = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
        self._history.append((self._version, (kind, versioned)))
        self._happened.set()

    def _raise_next_error(self, what: str) -> None:
        self.asked.append(what)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error

    async def pages(
        self, resource: Resource, namespace: str, labels: str
    ) -> AsyncIterator[tuple[Sequence[Mapping[str, Any]], str]]:
        assert (resource, namespace, labels) == (PODS, "team", "app=x")
        self._raise_next_error("list")
        version, items = str(self._version), list(self.objects.values())
        for start in range(0, max(len(items), 1), self.page_size):
            await asyncio.sleep(0)
            yield items[start : start + self.page_size], version
            if start == 0 and self.between_pages:
                self.between_pages.pop(0)()

    async def watch(
        self, resource: Resource, namespace: str, labels: str, version: str, seconds: int
    ) -> AsyncIterator[Event]:
        assert 200 < seconds < 400, "the API server ends watches after five minutes or so"
        self._cut = False
        self._raise_next_error(f"watch {version}")
        if int(version) < self._forgotten:
            raise GoneError("too old resource version", 410)
        sent = int(version)
        while not self._cut:
            self._happened.clear()
            for number, event in [entry for entry in self._history if entry[0] > sent]:
                sent = number
                yield event
            if not self._happened.is_set() and not self._cut:
                await self._happened.wait()


@dataclass
class Following:
    """A running reflector, with its reports and its waits."""

    cluster: Cluster
    reflector: Reflector[Mapping[str, Any]]
    task: asyncio.Task[None]
    changed: list[Hashable]
    slept: list[float]

    def known(self, group: Hashable = "a") -> set[str]:
        return set(self.reflector.of(group))

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        assert not self.task.done()


def following(
    cluster: Cluster,
    test: Callable[[Following], Coroutine[Any, Any, None]],
    view: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw: {
        "group": raw["group"], "n": raw.get("n"), "uid": raw["metadata"]["uid"]
    },
) -> None:  # fmt: skip
    """Run a test beside a reflector whose waits take no time."""

    async def main() -> None:
        changed: list[Hashable] = []
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(0)

        reflector: Reflector[Mapping[str, Any]] = Reflector(
            cluster, PODS, view, lambda view: view["group"], changed.append, labels="app=x", namespace="team",
            sleep=sleep,
        )  # fmt: skip
        task = asyncio.get_running_loop().create_task(reflector.run())
        now = Following(cluster, reflector, task, changed, slept)
        await now.settle()
        await test(now)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))


# Following
