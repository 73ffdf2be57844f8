"""Reflectors of a cluster in a dictionary, through all errors of its API server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError
from spotune_operator.kube.client import GoneError
from tests.operator.support.reflected_cluster import Cluster, Following, following, pod


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
        assert cluster.asked == ["list", "watch 103"], "one watch reports everything"

    following(cluster, test)


def test_ignored_object_is_not_reported() -> None:
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


def test_ended_watch_continues_from_its_version() -> None:
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


def test_deletion_between_watches_is_found_by_the_next_list() -> None:
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


def test_object_deleted_during_a_list_does_not_stay() -> None:
    """The list contains it, and the watch from the list's version reports its deletion."""
    cluster = Cluster(page_size=1)
    cluster.put(pod("1"), pod("2"))

    async def test(now: Following) -> None:
        cluster.errors = [GoneError("too old", 410)]
        cluster.between_pages = [lambda: cluster.delete("2")]
        cluster.cut()
        await now.settle()
        assert cluster.asked == ["list", "watch 102", "watch 102", "list", "watch 102"]
        assert now.known() == {"1"}

    following(cluster, test)


def test_expired_version_causes_a_new_list_after_a_wait() -> None:
    cluster = Cluster(errors=[None, GoneError("too old", 410), None, GoneError("too old", 410)])
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        assert cluster.asked == ["list", "watch 101"] * 3
        assert now.known() == {"1"}
        assert len(now.slept) == 2
        assert now.slept[1] > 0

    following(cluster, test)


def test_unreachable_api_server_is_retried_with_backoff_and_the_cache_stays() -> None:
    unreachable = [KubernetesError("cannot be reached")] * 12
    cluster = Cluster(errors=[None, None])
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        cluster.errors = list(unreachable)
        cluster.cut()
        await now.settle()
        assert cluster.asked == ["list"] + ["watch 101"] * 14
        assert now.known() == {"1"}
        assert now.changed == ["a"]
        assert now.slept[0] < 1
        assert 15 <= max(now.slept) <= 45
        assert now.slept[3] > now.slept[0]

    following(cluster, test)


def test_failed_list_is_retried_before_the_cache_is_synced() -> None:
    cluster = Cluster(errors=[KubernetesError("cannot be reached"), RefusedError("forbidden", 403)])
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        assert cluster.asked == ["list", "list", "list", "watch 101"]
        assert now.reflector.synced.is_set()

    following(cluster, test)


def test_kind_that_may_not_be_listed_is_never_synced() -> None:
    cluster = Cluster(errors=[RefusedError("forbidden", 403)] * 10_000)

    async def test(now: Following) -> None:
        assert not now.reflector.synced.is_set()
        assert len(now.slept) > 3

    following(cluster, test)


def test_rejected_watch_causes_a_new_list() -> None:
    """A restored etcd has lower versions than the cache: a watch from a future version always fails."""
    cluster = Cluster(errors=[None, KubernetesError("Too large resource version: 900", 504)])

    async def test(_: Following) -> None:
        assert cluster.asked == ["list", "watch 100", "list", "watch 100"]

    following(cluster, test)


def test_watches_that_end_at_once_are_renewed_after_a_wait() -> None:
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


def test_uninstalled_kind_is_empty_and_listed_again_later() -> None:
    missing = NotFoundError("the server could not find the requested resource", 404)
    cluster = Cluster(errors=[missing, missing, missing])
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        assert now.reflector.synced.is_set()
        assert cluster.asked[:4] == ["list"] * 4
        assert now.known() == {"1"}, "it was installed later"
        assert all(30 <= seconds <= 90 for seconds in now.slept[:1])

    following(cluster, test)


def test_uninstalling_a_kind_removes_its_objects() -> None:
    cluster = Cluster()
    cluster.put(pod("1"))

    async def test(now: Following) -> None:
        cluster.errors = [NotFoundError("no such kind", 404)] * 10_000
        cluster.cut()
        await now.settle()
        assert now.known() == set()
        assert now.changed == ["a", "a"]
        assert now.reflector.synced.is_set()

    following(cluster, test)


# Odd objects


def test_malformed_object_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.put(pod("1", n=1), pod("2", n="odd"))

    def view(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"group": raw["group"], "n": int(raw["n"])}

    async def test(now: Following) -> None:
        assert now.known() == {"1"}
        cluster.put(pod("1", n="odd now"), pod("3", n=3))
        await now.settle()
        assert now.known() == {"1", "3"}, "the last valid view stays"
        cluster.delete("1")
        await now.settle()
        assert now.known() == {"3"}

    with caplog.at_level(logging.ERROR):
        following(cluster, test, view)
    assert "ignoring the malformed Pod team/pod-2" in caplog.text
