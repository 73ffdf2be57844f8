"""Which replica gets a request."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from spotune_serve.deployment.token_transport.messages import Destination

_UNAVAILABLE_SECONDS: Final = 5.0


class LeastRequestRouter(RequestRouter):
    """Chooses the replica that has the fewest requests of this gateway.

    Ray Serve's own router asks replicas for the lengths of their queues, and remembers them for ten seconds. While it
    waits for the answer of a new replica, all requests go to the others, and a busy gateway waits long: the answer must
    be read within 0.1 s. A gateway knows its own requests without asking, and other gateways balance theirs.
    """

    def initialize_state(self, **_kwargs: Any) -> None:
        """Ray Serve calls it after `__init__`."""
        self._running: Counter[ReplicaID] = Counter()
        self._unavailable: dict[ReplicaID, float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, in any order. Ray Serve takes the one with the shortest queue, of which it is told here.

        One that did not answer lately is left to Ray Serve, which asks it first.
        """
        for argument in pending_request.args if pending_request is not None else ():
            if isinstance(argument, Destination):
                argument.on_chosen()
        now = time.monotonic()
        for replica in candidate_replicas:
            if now >= self._unavailable.get(replica.replica_id, now):
                self.replica_queue_len_cache.update(replica.replica_id, self._running[replica.replica_id])
        return [random.sample(candidate_replicas, len(candidate_replicas))]

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
