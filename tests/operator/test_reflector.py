"""Caches that follow a cluster, through every trouble of its API server; the cluster is a dictionary here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError
from spotune_operator.kube import PODS, GoneError, Resource
from spotune_operator.reflector import Reflector

Event = tuple[str, Mapping[str, Any]]


def pod(uid: str, group: str | None = "a", **more: Any) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": f"pod-{uid}", "namespace": "team"}, "group": group, **more}


@dataclass
class Cluster:
    """Objects of one kind, with versions and a history that may be forgotten.

    Attributes:
        objects: By uid.
        page_size: Objects of a page.
        troubles: Raised by the next lists and watches, one each; None: that one goes well.
        asked: What was asked: "list", or "watch" with the version that it goes on from.
        between_pages: Called, one each, after the first page of the next lists.
    """

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    page_size: int = 2
    troubles: list[Exception | None] = field(default_factory=list)
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
        """End the running watch; of what goes and comes now no watch will ever tell, if anything does."""
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
        said = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
        self._history.append((self._version, (kind, said)))
        self._happened.set()

    def _trouble(self, what: str) -> None:
        self.asked.append(what)
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble is not None:
            raise trouble

    async def pages(
        self, resource: Resource, namespace: str, labels: str
    ) -> AsyncIterator[tuple[Sequence[Mapping[str, Any]], str]]:
        assert (resource, namespace, labels) == (PODS, "team", "app=x")
        self._trouble("list")
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
        self._trouble(f"watch {version}")
        if int(version) < self._forgotten:
            raise GoneError("too old resource version", 410)
        seen = int(version)
        while not self._cut:
            self._happened.clear()
            for number, event in [entry for entry in self._history if entry[0] > seen]:
                seen = number
                yield event
            if not self._happened.is_set() and not self._cut:
                await self._happened.wait()


@dataclass
class Following:
    """A reflector that runs, with what it said and how long it slept."""

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
    """Run a test beside a reflector, whose waits take no time."""

    async def main() -> None:
        changed: list[Hashable] = []
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(0)

        reflector: Reflector[Mapping[str, Any]] = Reflector(
            cluster, PODS, view, lambda seen: seen["group"], changed.append, labels="app=x", namespace="team",
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


def test_cache_holds_what_the_cluster_holds() -> None:
    cluster = Cluster()
    cluster.put(pod("1"), pod("2"), pod("3", "b"))

    async def test(now: Following) -> None:
        assert now.reflector.synced.is_set()
        assert (now.known("a"), now.known("b"), now.known("c")) == ({"1", "2"}, {"3"}, set())
        assert cluster.asked == ["list", "watch 103"]
        cluster.put(pod("4"))
        cluster.delete("1")
        await now.settle()
        assert now.known() == {"2", "4"}
        assert {view["uid"] for view in now.reflector.all()} == {"2", "3", "4"}
        assert now.changed == ["a", "a", "b", "a", "a"]
        assert cluster.asked == ["list", "watch 103"], "one watch tells it all"

    following(cluster, test)


def test_nothing_is_said_of_what_is_not_looked_at() -> None:
    cluster = Cluster()
    cluster.put(pod("1", n=1))

    async def test(now: Following) -> None:
        cluster.put(pod("1", n=1, heartbeat=2))
        await now.settle()
        assert now.changed == ["a"]
        cluster.put(pod("1", n=2))
        await now.settle()
        assert now.changed == ["a", "a"]

    following(cluster, test)


def test_object_that_moves_to_another_group_leaves_the_first() -> None:
    cluster = Cluster()
    cluster.put(pod("1", "a"))

    async def test(now: Following) -> None:
        cluster.put(pod("1", "b"))
        await now.settle()
        assert (now.known("a"), now.known("b")) == (set(), {"1"})
        cluster.put(pod("1", None))
        await now.settle()
        assert list(now.reflector.all()) == []
        assert now.changed == ["a", "a", "b", "b"]

    following(cluster, test)


def test_replaced_object_of_the_same_name_is_another_one() -> None:
    cluster = Cluster()
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        cluster.put(pod("2"))
        cluster.delete("1")
        await now.settle()
        assert now.known() == {"2"}

    following(cluster, test)


# Breaks


def test_watch_that_ends_is_renewed_from_where_it_was() -> None:
    cluster = Cluster()
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        cluster.bookmark()
        await now.settle()
        cluster.cut()
        await now.settle()
        assert cluster.asked == ["list", "watch 101", "watch 102"]
        assert now.slept == []

    following(cluster, test)


def test_what_went_while_nobody_watched_is_noticed_by_the_next_list() -> None:
    cluster = Cluster()
    cluster.put(pod("1"), pod("2"), pod("3"))

    async def test(now: Following) -> None:
        cluster.bookmark()
        await now.settle()
        cluster.cut(forgetting=["2"], adding=[pod("4")])
        now.changed.clear()
        await now.settle()
        assert now.known() == {"1", "3", "4"}
        assert now.changed == ["a", "a"]
        assert cluster.asked == ["list", "watch 103", "watch 104", "list", "watch 105"]

    following(cluster, test)


def test_object_that_goes_while_it_is_listed_does_not_stay() -> None:
    """The list shows it, and the watch from the list's version tells of its end."""
    cluster = Cluster(page_size=1)
    cluster.put(pod("1"), pod("2"))

    async def test(now: Following) -> None:
        cluster.troubles = [GoneError("too old", 410)]
        cluster.between_pages = [lambda: cluster.delete("2")]
        cluster.cut()
        await now.settle()
        assert cluster.asked == ["list", "watch 102", "watch 102", "list", "watch 102"]
        assert now.known() == {"1"}

    following(cluster, test)


def test_forgotten_version_is_listed_anew_after_a_pause() -> None:
    cluster = Cluster(troubles=[None, GoneError("too old", 410), None, GoneError("too old", 410)])
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        assert cluster.asked == ["list", "watch 101"] * 3
        assert now.known() == {"1"}
        assert len(now.slept) == 2
        assert now.slept[1] > 0

    following(cluster, test)


def test_unreachable_api_server_is_asked_with_growing_pauses_and_nothing_is_forgotten() -> None:
    unreachable = [KubernetesError("cannot be reached")] * 12
    cluster = Cluster(troubles=[None, None])
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        cluster.troubles = list(unreachable)
        cluster.cut()
        await now.settle()
        assert cluster.asked == ["list"] + ["watch 101"] * 14
        assert now.known() == {"1"}
        assert now.changed == ["a"]
        assert now.slept[0] < 1
        assert 15 <= max(now.slept) <= 45
        assert now.slept[3] > now.slept[0]

    following(cluster, test)


def test_list_that_fails_is_tried_again_before_anything_is_ready() -> None:
    cluster = Cluster(troubles=[KubernetesError("cannot be reached"), RefusedError("forbidden", 403)])
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        assert cluster.asked == ["list", "list", "list", "watch 101"]
        assert now.reflector.synced.is_set()

    following(cluster, test)


def test_kind_that_may_not_be_listed_is_never_ready() -> None:
    cluster = Cluster(troubles=[RefusedError("forbidden", 403)] * 10_000)

    async def test(now: Following) -> None:
        assert not now.reflector.synced.is_set()
        assert len(now.slept) > 3

    following(cluster, test)


def test_refused_watch_lists_anew_for_the_server_may_remember_another_past() -> None:
    """A restored etcd has lower versions than ours: a watch from the future is refused for ever."""
    cluster = Cluster(troubles=[None, KubernetesError("Too large resource version: 900", 504)])

    async def test(_: Following) -> None:
        assert cluster.asked == ["list", "watch 100", "list", "watch 100"]

    following(cluster, test)


def test_watches_that_end_at_once_are_not_renewed_without_a_pause() -> None:
    """A proxy may answer every watch with an empty page."""
    cluster = Cluster()

    async def test(now: Following) -> None:
        for _ in range(6):
            cluster.cut()
            await now.settle()
        assert len(now.slept) == 6
        assert now.slept[-1] > 4

    following(cluster, test)


# Kinds that are not installed


def test_kind_that_is_not_installed_counts_as_empty_and_is_looked_for_again() -> None:
    missing = NotFoundError("the server could not find the requested resource", 404)
    cluster = Cluster(troubles=[missing, missing, missing])
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        assert now.reflector.synced.is_set()
        assert cluster.asked[:4] == ["list"] * 4
        assert now.known() == {"1"}, "it was installed in the end"
        assert all(30 <= seconds <= 90 for seconds in now.slept[:1])

    following(cluster, test)


def test_kind_that_is_taken_away_takes_its_objects_along() -> None:
    cluster = Cluster()
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        cluster.troubles = [NotFoundError("no such kind", 404)] * 10_000
        cluster.cut()
        await now.settle()
        assert now.known() == set()
        assert now.changed == ["a", "a"]
        assert now.reflector.synced.is_set()

    following(cluster, test)


# Odd objects


def test_one_odd_object_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.put(pod("1", n=1), pod("2", n="odd"))

    def view(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"group": raw["group"], "n": int(raw["n"])}

    async def test(now: Following) -> None:
        assert now.known() == {"1"}
        cluster.put(pod("1", n="odd now"), pod("3", n=3))
        await now.settle()
        assert now.known() == {"1", "3"}, "of the one that became odd, what was known stays"
        cluster.delete("1")
        await now.settle()
        assert now.known() == {"3"}

    with caplog.at_level(logging.ERROR):
        following(cluster, test, view)
    assert "Pod team/pod-2 is passed over" in caplog.text
