"""Which replica gets a request."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from spotune_serve.deployment.token_transport.draining_nodes import watch_draining_nodes
from spotune_serve.deployment.token_transport.messages import Destination

_UNAVAILABLE_SECONDS: Final = 5.0


class LeastRequestRouter(RequestRouter):
    """Chooses the replica that has the fewest requests of this gateway.

    Ray Serve's own router asks replicas for the lengths of their queues, and remembers them for ten seconds. While it
    waits for the answer of a new replica, all requests go to the others, and a busy gateway waits long: the answer must
    be read within 0.1 s. A gateway knows its own requests without asking, and other gateways balance theirs.

    A replica whose node is draining gets requests only if no other one takes them.
    """

    def initialize_state(self, draining_nodes: Callable[[], Collection[str]] | None = None, **_kwargs: Any) -> None:
        """Ray Serve calls it after `__init__`.

        Args:
            draining_nodes: returns the ids of the draining nodes, without blocking; by default those that Ray's head
                tells.
        """
        self._draining_nodes = draining_nodes or watch_draining_nodes()
        self._running: Counter[ReplicaID] = Counter()
        self._unavailable: dict[ReplicaID, float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, in any order: first those that stay, then those whose nodes are draining.

        Of the first ones, Ray Serve takes the one with the shortest queue, of which it is told here. One that did not
        answer lately is left to Ray Serve, which asks it first.
        """
        for argument in pending_request.args if pending_request is not None else ():
            if isinstance(argument, Destination):
                argument.on_chosen()
        now = time.monotonic()
        for replica in candidate_replicas:
            if now >= self._unavailable.get(replica.replica_id, now):
                self.replica_queue_len_cache.update(replica.replica_id, self._running[replica.replica_id])
        draining = self._draining_nodes()
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        staying = [replica for replica in shuffled if replica.node_id not in draining]
        leaving = [replica for replica in shuffled if replica.node_id in draining]
        return [staying, leaving]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request."""
        super().on_send_request(replica_id)
        self._running[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count it no more."""
        super().on_request_completed(replica_id, internal_request_id)
        self._running[replica_id] -= 1

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Let Ray Serve ask the replica before it gets requests again."""
        super().on_replica_actor_unavailable(replica_id)
        self._unavailable[replica_id] = time.monotonic() + _UNAVAILABLE_SECONDS

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that have left."""
        super().update_replicas(replicas)
        present = {replica.replica_id for replica in replicas}
        self._running = Counter({each: count for each, count in self._running.items() if each in present})
        self._unavailable = {each: until for each, until in self._unavailable.items() if each in present}
