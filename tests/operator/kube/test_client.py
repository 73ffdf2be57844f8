"""The client of the API server, against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
import yaml

from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError
from spotune_operator.kube.client import (
    EVENTS,
    FINETUNE_JOBS,
    NODES,
    PODS,
    RAY_CLUSTERS,
    ConflictError,
    GoneError,
    Kube,
)
from tests.operator.support.local_server import (
    Answer,
    LocalServer,
    answer,
    failure,
    local_server,
    silence,
    stream,
)

CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "spotune-a", "namespace": "team"}}
EVENT = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "a.1", "namespace": "team"}}


@asynccontextmanager
async def talking(*answers: Answer, **patience: float) -> AsyncIterator[tuple[Kube, LocalServer]]:
    """A client and its server; each login returns another token."""
    async with local_server(*answers) as server:
        tokens = iter(range(1, 100))

        def login() -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=server.url, token=f"token-{next(tokens)}")

        async with Kube(login, **patience) as kube:
            yield kube, server


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


async def apply(kube: Kube) -> Any:
    return await kube.apply(CLAIM)


async def watch(kube: Kube) -> list[tuple[str, Any]]:
    return [event async for event in kube.watch(PODS, "team", "a=b", "7", 300)]


def line(kind: str, **metadata: Any) -> bytes:
    return json.dumps({"type": kind, "object": {"metadata": metadata}}).encode() + b"\n"


def test_apply_is_server_side_and_forced() -> None:
    async def test() -> None:
        async with talking(answer({"metadata": {"uid": "u"}})) as (kube, server):
            assert await kube.apply(CLAIM) == {"metadata": {"uid": "u"}}
        (asked,) = server.asked
        assert asked.words == "PATCH /api/v1/namespaces/team/persistentvolumeclaims/spotune-a"
        assert asked.query == {"fieldManager": "spotune", "force": "true"}
        assert asked.headers["Content-Type"] == "application/apply-patch+yaml"
        assert asked.headers["Authorization"] == "Bearer token-1"
        assert asked.body == CLAIM

    run(test())


@pytest.mark.parametrize(
    "text", ["😀", "a\\", "\\😀", "\\ud83d\\ude00", "\x00\x7f\x85\u2028\ufeff", "e\u0301 ٣", '"\t\n']
)
def test_applied_manifest_is_valid_yaml(text: str) -> None:
    async def test() -> None:
        async with talking(answer()) as (kube, server):
            await kube.apply({**CLAIM, "data": {text: text}})
            await kube.patch(FINETUNE_JOBS, "team", "a", {"status": {"phase": text}}, "status")
        applied, patched = server.asked
        assert yaml.safe_load(applied.text)["data"] == {text: text}
        assert json.loads(patched.text) == {"status": {"phase": text}}

    run(test())


def test_status_is_merged() -> None:
    async def test() -> None:
        async with talking(answer()) as (kube, server):
            await kube.patch(FINETUNE_JOBS, "team", "a", {"status": {"step": 3}}, "status")
            await kube.patch(NODES, "", "n1", {"spec": {"unschedulable": True}})
        first, second = server.asked
        assert first.words == "PATCH /apis/spotune.dev/v1alpha1/namespaces/team/finetunejobs/a/status"
        assert first.headers["Content-Type"] == "application/merge-patch+json"
        assert second.words == "PATCH /api/v1/nodes/n1"

    run(test())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RefusedError),
        (403, RefusedError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, GoneError),
        (413, RefusedError),
        (422, RefusedError),
        (429, KubernetesError),
        (500, KubernetesError),
        (503, KubernetesError),
    ],
)
def test_rejections_are_distinguished_from_temporary_errors(status: int, kind: type[KubernetesError]) -> None:
    async def test() -> None:
        async with talking(failure(status, "exceeded quota: storage")) as (kube, server):
            with pytest.raises(kind, match="exceeded quota: storage") as raised:
                await kube.apply(CLAIM)
            assert type(raised.value) is kind
            assert raised.value.status == status
            assert len(server.asked) == 1

    run(test())


@pytest.mark.parametrize("page", ["", "<html>bad gateway</html>", "[]", '{"message": null}', '"text"'])
def test_page_of_a_proxy_is_an_error(page: str) -> None:
    async def test() -> None:
        async with talking(answer(page, 502)) as (kube, _):
            with pytest.raises(KubernetesError, match="the API server responded with HTTP 502: "):
                await kube.apply(CLAIM)

    run(test())


@pytest.mark.parametrize("call", [apply, watch])
def test_response_without_json_is_an_error(call: Callable[[Kube], Coroutine[Any, Any, Any]]) -> None:
    async def test() -> None:
        async with talking(answer("<html>log in here</html>\n")) as (kube, _):
            with pytest.raises(KubernetesError, match="did not respond with valid JSON"):
                await call(kube)

    run(test())


@pytest.mark.parametrize("call", [apply, watch])
def test_unreachable_api_server_is_an_error(
    call: Callable[[Kube], Coroutine[Any, Any, Any]],
) -> None:
    async def test() -> None:
        async with talking(answer()) as (kube, server):
            port = server.url.rpartition(":")[2]
        async with Kube(lambda: kopf.ConnectionInfo(server=f"http://127.0.0.1:{port}")) as kube:
            with pytest.raises(KubernetesError, match="cannot be reached"):
                await call(kube)

    run(test())


def test_silent_api_server_times_out() -> None:
    async def test() -> None:
        async with talking(silence, request_seconds=0.2) as (kube, _):
            with pytest.raises(KubernetesError, match=r"cannot be reached .*TimeoutError"):
                await kube.apply(CLAIM)

    run(test())


# Credentials


@pytest.mark.parametrize("call", [apply, watch])
def test_expired_credentials_are_renewed(call: Callable[[Kube], Coroutine[Any, Any, Any]]) -> None:
    async def test() -> None:
        async with talking(failure(401, "Unauthorized"), answer({"type": "ADDED", "object": {}})) as (kube, server):
            await call(kube)
            await call(kube)
        assert [asked.headers["Authorization"] for asked in server.asked] == [
            "Bearer token-1",
            "Bearer token-2",
            "Bearer token-2",
        ]

    run(test())


@pytest.mark.parametrize("call", [apply, watch])
def test_rejected_credentials_are_an_error(call: Callable[[Kube], Coroutine[Any, Any, Any]]) -> None:
    async def test() -> None:
        async with talking(failure(401, "Unauthorized")) as (kube, server):
            with pytest.raises(KubernetesError, match="HTTP 401: Unauthorized"):
                await call(kube)
        assert len(server.asked) == 2

    run(test())


def test_concurrent_rejected_requests_log_in_once() -> None:
    async def test() -> None:
        async with local_server() as server:
            logins: list[int] = []
            all_asked, logged_in = asyncio.Barrier(8), asyncio.Event()

            def login() -> kopf.ConnectionInfo:
                logins.append(1)
                return kopf.ConnectionInfo(server=server.url, token=f"token-{len(logins)}")

            async def by_token(request: Any) -> Any:
                if request.headers["Authorization"] != "Bearer token-1":
                    logged_in.set()
                    return await answer({"metadata": {}})(request)
                if await all_asked.wait() > 0:  # all but one hear of it once that one has logged in anew
                    await logged_in.wait()
                return await failure(401, "expired")(request)

            server.respond_with(by_token)
            async with Kube(login) as kube:
                assert await asyncio.gather(*(kube.apply(CLAIM) for _ in range(8))) == [{"metadata": {}}] * 8
            assert len(logins) == 2

    run(test())


# Single requests


def test_existing_event_is_not_created_again() -> None:
    async def test() -> None:
        async with talking(answer({}, 201), failure(409, "already exists"), failure(403, "forbidden")) as (
            kube,
            server,
        ):
            assert await kube.create(EVENTS, EVENT) is True
            assert await kube.create(EVENTS, EVENT) is False
            with pytest.raises(RefusedError):
                await kube.create(EVENTS, EVENT)
        assert server.asked[0].words == "POST /api/v1/namespaces/team/events"

    run(test())


def test_only_the_object_with_the_uid_is_deleted() -> None:
    async def test() -> None:
        async with talking(answer(), failure(404, "gone"), failure(409, "another uid"), failure(403, "no")) as (
            kube,
            server,
        ):
            await kube.delete(RAY_CLUSTERS, "team", "spotune-a", "uid-1")
            await kube.delete(PODS, "team", "head", "uid-2", grace_seconds=0)
            await kube.delete(NODES, "", "n1", "uid-3")
            with pytest.raises(RefusedError):
                await kube.delete(NODES, "", "n1", "uid-3")
        first, second, third, _ = server.asked
        assert first.words == "DELETE /apis/ray.io/v1/namespaces/team/rayclusters/spotune-a"
        assert first.body == {"preconditions": {"uid": "uid-1"}, "propagationPolicy": "Background"}
        assert second.body["gracePeriodSeconds"] == 0
        assert third.words == "DELETE /api/v1/nodes/n1"

    run(test())


def test_an_eviction_waits_for_the_disruption_budget() -> None:
    async def test() -> None:
        async with talking(answer(), failure(404, "gone"), failure(429, "budget"), failure(403, "no")) as (
            kube,
            server,
        ):
            assert await kube.evict("team", "p") is True
            assert await kube.evict("team", "p") is True
            assert await kube.evict("team", "p") is False
            with pytest.raises(RefusedError):
                await kube.evict("team", "p")
        assert server.asked[0].words == "POST /api/v1/namespaces/team/pods/p/eviction"

    run(test())


def test_every_request_is_counted_by_verb_and_kind() -> None:
    async def test() -> None:
        counted: list[tuple[str, str]] = []
        async with talking(answer({"items": [], "metadata": {"resourceVersion": "1"}})) as (kube, _):
            kube.count = lambda verb, plural: counted.append((verb, plural))
            await kube.apply(CLAIM)
            await kube.patch(FINETUNE_JOBS, "team", "a", {}, "status")
            await kube.evict("team", "p")
            await kube.pods_of(namespace="team", labels="a=b", fields="spec.nodeName=n1")
            async for _page in kube.pages(NODES, "", ""):
                pass
            async for _page in kube.pages(RAY_CLUSTERS, "", "a=b"):
                pass
        assert counted == [
            ("PATCH", "persistentvolumeclaims"),
            ("PATCH", "finetunejobs"),
            ("POST", "pods"),
            ("GET", "pods"),
            ("GET", "nodes"),
            ("GET", "rayclusters"),
        ]

    run(test())


# Lists and watches


def test_long_list_is_read_in_pages() -> None:
    pages = [
        answer({"items": [{"n": 1}, {"n": 2}], "metadata": {"resourceVersion": "9", "continue": "more"}}),
        answer({"items": [{"n": 3}], "metadata": {"resourceVersion": "9", "continue": ""}}),
    ]

    async def test() -> None:
        async with talking(*pages) as (kube, server):
            found = [page async for page in kube.pages(PODS, "", "a=b")]
        assert found == [([{"n": 1}, {"n": 2}], "9"), ([{"n": 3}], "9")]
        assert [asked.query for asked in server.asked] == [
            {"limit": "500", "labelSelector": "a=b"},
            {"limit": "500", "labelSelector": "a=b", "continue": "more"},
        ]
        assert server.asked[0].words == "GET /api/v1/pods"

    run(test())


def test_watch_continues_from_a_version_and_reads_lines_of_any_length() -> None:
    long = line("MODIFIED", name="x" * 200_000)
    parts = [line("ADDED", name="a") + line("ADDED", name="b"), long[:70_000], long[70_000:], line("BOOKMARK")]

    async def test() -> None:
        async with talking(stream(*parts)) as (kube, server):
            found = await watch(kube)
        assert [kind for kind, _ in found] == ["ADDED", "ADDED", "MODIFIED", "BOOKMARK"]
        assert len(found[2][1]["metadata"]["name"]) == 200_000
        assert server.asked[0].query == {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": "7",
            "timeoutSeconds": "300",
            "labelSelector": "a=b",
        }

    run(test())


@pytest.mark.parametrize(
    ("code", "kind"), [(410, GoneError), (500, KubernetesError), (504, KubernetesError), (403, RefusedError)]
)
def test_an_error_within_a_watch_ends_it(code: int, kind: type[KubernetesError]) -> None:
    error = {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "too old resource version"}}

    async def test() -> None:
        async with talking(stream(line("ADDED"), json.dumps(error).encode() + b"\n", silent=True)) as (kube, _):
            with pytest.raises(kind, match="too old resource version") as raised:
                await watch(kube)
            assert type(raised.value) is kind
            assert raised.value.status == code

    run(test())


def test_cut_watch_yields_its_events_and_then_fails() -> None:
    async def test() -> None:
        async with talking(stream(line("ADDED", name="a"), b'{"type": "MODI', cut=True)) as (kube, _):
            events = kube.watch(PODS, "", "", "7", 300)
            assert await anext(events) == ("ADDED", {"metadata": {"name": "a"}})
            with pytest.raises(KubernetesError, match="cannot be reached"):
                await anext(events)

    run(test())


def test_watch_without_events_times_out() -> None:
    async def test() -> None:
        async with talking(stream(line("ADDED"), silent=True), silence_seconds=0.2) as (kube, _):
            with pytest.raises(KubernetesError, match="cannot be reached"):
                await watch(kube)

    run(test())
