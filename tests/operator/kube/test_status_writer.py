"""The status writer against an API server in a dictionary."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from spotune.service import ModelServiceStatus
from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError
from spotune_operator.kube.client import MODEL_SERVICES, ConflictError, Resource
from spotune_operator.kube.phase_change import PhaseChange
from spotune_operator.kube.status_writer import StatusWriter

BEFORE = ModelServiceStatus(phase="Deploying", ready_replicas=0, url="http://a")
AFTER = ModelServiceStatus(phase="Serving", ready_replicas=1, url="http://a")


def content_of(status: ModelServiceStatus) -> dict[str, Any]:
    content: dict[str, Any] = status.model_dump(mode="json", exclude_none=True)
    return content


@dataclass(frozen=True)
class Cached:
    """An object in a cache."""

    status: dict[str, Any]
    key: tuple[str, str] = ("team", "answers")
    uid: str = "u1"
    version: int = 6


@dataclass
class FakeServer:
    """Records the requests in order.

    Attributes:
        requests: What was sent.
        error: Raised by patches.
        event_error: Raised by the creation of Events.
    """

    requests: list[tuple[str, Any]] = field(default_factory=list)
    error: Exception | None = None
    event_error: Exception | None = None

    async def patch(
        self, resource: Resource, namespace: str, name: str, changes: dict[str, Any], subresource: str = ""
    ) -> dict[str, Any]:
        self.requests.append((f"PATCH {resource.path(namespace, name, subresource)}", changes))
        if self.error is not None:
            raise self.error
        return {"metadata": {"resourceVersion": "7"}}

    async def create(self, resource: Resource, manifest: dict[str, Any]) -> bool:
        self.requests.append((f"POST {resource.plural}", manifest))
        if self.event_error is not None:
            raise self.event_error
        return True


@dataclass
class Bench:
    """A writer with its fakes."""

    server: FakeServer = field(default_factory=FakeServer)
    written: list[Any] = field(default_factory=list)
    changes: list[PhaseChange] = field(default_factory=list)

    def write(self, cached: Cached, previous: ModelServiceStatus, status: ModelServiceStatus) -> bool:
        writer = StatusWriter(self.server, MODEL_SERVICES, self._events, self.written.append, self.changes.append)
        return asyncio.run(writer.write(cached, previous, status))

    def _events(
        self, cached: Cached, previous: ModelServiceStatus, status: ModelServiceStatus
    ) -> Iterator[dict[str, Any]]:
        yield {"about": cached.uid, "from": previous.phase, "to": status.phase}


def test_changed_fields_are_written_after_the_events() -> None:
    bench = Bench()
    assert bench.write(Cached(content_of(BEFORE)), BEFORE, AFTER)
    assert bench.server.requests == [
        ("POST events", {"about": "u1", "from": "Deploying", "to": "Serving"}),
        (
            f"PATCH /apis/spotune.dev/v1alpha1/namespaces/team/{MODEL_SERVICES.plural}/answers/status",
            {"metadata": {"uid": "u1", "resourceVersion": "6"}, "status": {"phase": "Serving", "readyReplicas": 1}},
        ),
    ]
    assert bench.written == [{"metadata": {"resourceVersion": "7"}}]


def test_unchanged_status_is_not_written() -> None:
    bench = Bench()
    assert bench.write(Cached(content_of(BEFORE)), BEFORE, BEFORE)
    assert bench.server.requests == []
    assert bench.written == []


def test_fields_that_the_api_server_lacks_are_written_even_if_they_have_not_changed() -> None:
    """Fields of a newer version, or all of them before the first reconcile."""
    bench = Bench()
    stored = {name: value for name, value in content_of(BEFORE).items() if name != "url"}
    assert bench.write(Cached(stored), BEFORE, BEFORE)
    assert bench.server.requests[-1][1]["status"] == {"url": "http://a"}


def test_object_that_is_gone_is_not_stored() -> None:
    bench = Bench(FakeServer(error=NotFoundError("not found", 404)))
    assert not bench.write(Cached(content_of(BEFORE)), BEFORE, AFTER)
    assert bench.written == []


def test_a_status_that_was_decided_on_an_older_object_is_not_stored() -> None:
    """Such as that of an operator which is being deleted while its successor writes."""
    bench = Bench(FakeServer(error=ConflictError("the object has been modified", 409)))
    with pytest.raises(ConflictError):
        bench.write(Cached(content_of(BEFORE)), BEFORE, AFTER)
    assert bench.server.requests[-1][1]["metadata"]["resourceVersion"] == "6"
    assert bench.written == []
    assert bench.changes == []


def test_other_errors_of_the_api_server_are_raised() -> None:
    bench = Bench(FakeServer(error=KubernetesError("etcd leader changed", 500)))
    with pytest.raises(KubernetesError, match="etcd leader changed"):
        bench.write(Cached(content_of(BEFORE)), BEFORE, AFTER)
    assert bench.written == []


@pytest.mark.parametrize(
    "refusal",
    [
        KubernetesError("the EventRateLimit plugin allows no more", 429),
        KubernetesError("the etcd of Events is away", 500),
        RefusedError("exceeded quota: count/events", 403),
    ],
    ids=["limited", "failed", "refused"],
)
def test_a_status_does_not_wait_for_an_event_that_the_api_server_does_not_take(refusal: KubernetesError) -> None:
    bench = Bench(FakeServer(event_error=refusal))
    assert bench.write(Cached(content_of(BEFORE)), BEFORE, AFTER)
    assert bench.server.requests[-1][1]["status"] == {"phase": "Serving", "readyReplicas": 1}
    assert len(bench.written) == 1


def test_an_unreachable_api_server_gets_the_event_and_the_status_later() -> None:
    bench = Bench(FakeServer(event_error=KubernetesError("the API server cannot be reached")))
    with pytest.raises(KubernetesError, match="cannot be reached"):
        bench.write(Cached(content_of(BEFORE)), BEFORE, AFTER)
    assert [words for words, _ in bench.server.requests] == ["POST events"]


def test_a_change_of_the_phase_is_told_once_it_is_written() -> None:
    bench = Bench()
    assert bench.write(Cached(content_of(BEFORE)), BEFORE, AFTER)
    [change] = bench.changes
    assert (change.kind, change.previous, change.phase, change.version) == ("ModelService", "Deploying", "Serving", "7")
    gone = Bench(FakeServer(error=NotFoundError("not found", 404)))
    gone.write(Cached(content_of(BEFORE)), BEFORE, AFTER)
    same = AFTER.model_copy(update={"phase": BEFORE.phase})
    bench.write(Cached(content_of(BEFORE)), BEFORE, same)
    assert (len(bench.changes), gone.changes) == (1, [])
