"""The choice of a replica, by Ray Serve's real router with replicas that never answer its questions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from spotune_serve.deployment.token_transport.messages import Destination
from spotune_serve.deployment.token_transport.router import LeastRequestRouter

pytestmark = pytest.mark.anyio
DEPLOYMENT = DeploymentID("Replica", "model")


class BusyReplica:
    """A replica whose answers about its queue come too late."""

    max_ongoing_requests = 10_000

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.node_id = f"node of {name}"

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(deadline_s)
        raise TimeoutError


class Requests:
    """Requests of one gateway."""

    def __init__(self, *replicas: BusyReplica) -> None:
        self._router: Any = LeastRequestRouter(
            DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.draining: set[str] = set()
        self._router.initialize_state(draining_nodes=lambda: self.draining)
        self.update(replicas)

    def update(self, replicas: Sequence[BusyReplica]) -> None:
        """Ray Serve's controller lists these replicas."""
        self._router.update_replicas(list(replicas))

    async def send(self, *arguments: Any) -> ReplicaID:
        """Choose a replica and send it a request."""
        metadata = RequestMetadata(request_id="r", internal_request_id=str(id(object())))
        replica = await self._router._choose_replica_for_request(PendingRequest(list(arguments), {}, metadata))
        self._router.on_send_request(replica.replica_id)
        found: ReplicaID = replica.replica_id
        return found

    def complete(self, replica: ReplicaID) -> None:
        """A request has ended."""
        self._router.on_request_completed(replica, "r")

    def lose(self, replica: BusyReplica) -> None:
        """A replica did not answer a request."""
        self._router.on_replica_actor_unavailable(replica.replica_id)


async def test_requests_are_spread_evenly_from_the_first_one() -> None:
    requests = Requests(BusyReplica("a"), BusyReplica("b"), BusyReplica("c"))
    chosen = Counter([await requests.send() for _ in range(30)])
    assert sorted(chosen.values()) == [10, 10, 10]


async def test_a_new_replica_gets_requests_at_once() -> None:
    old, new = BusyReplica("old"), BusyReplica("new")
    requests = Requests(old)
    assert {await requests.send() for _ in range(5)} == {old.replica_id}
    requests.update([old, new])
    assert [await requests.send() for _ in range(5)] == [new.replica_id] * 5


async def test_finished_requests_count_no_more() -> None:
    first, second = BusyReplica("a"), BusyReplica("b")
    requests = Requests(first, second)
    for _ in range(10):
        await requests.send()
    for _ in range(4):
        requests.complete(first.replica_id)
    assert [await requests.send() for _ in range(4)] == [first.replica_id] * 4


async def test_a_replica_that_does_not_answer_gets_no_request_at_first() -> None:
    lost, other = BusyReplica("lost"), BusyReplica("other")
    requests = Requests(lost, other)
    for _ in range(2):
        await requests.send()
    requests.complete(lost.replica_id)
    requests.lose(lost)
    assert [await requests.send() for _ in range(5)] == [other.replica_id] * 5


async def test_a_replica_on_a_draining_node_gets_no_request_while_another_one_stays() -> None:
    leaving, staying = BusyReplica("leaving"), BusyReplica("staying")
    requests = Requests(leaving, staying)
    for _ in range(4):
        await requests.send()
    requests.draining.add(leaving.node_id)
    assert [await requests.send() for _ in range(5)] == [staying.replica_id] * 5


async def test_a_replica_on_a_draining_node_gets_requests_if_no_other_one_takes_them() -> None:
    leaving, lost = BusyReplica("leaving"), BusyReplica("lost")
    requests = Requests(leaving, lost)
    requests.draining.add(leaving.node_id)
    requests.lose(lost)
    assert [await requests.send() for _ in range(3)] == [leaving.replica_id] * 3
    requests.update([leaving])
    assert await requests.send() == leaving.replica_id


async def test_the_gateway_learns_when_a_replica_was_chosen() -> None:
    chosen: list[bool] = []
    destination = Destination("127.0.0.1", 1, b"", 1, on_chosen=lambda: chosen.append(True))
    await Requests(BusyReplica("a")).send("request", destination)
    assert chosen == [True]
