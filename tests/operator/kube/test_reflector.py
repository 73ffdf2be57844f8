"""Caches that follow a cluster, through every trouble of its API server; the cluster is a dictionary here."""

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
