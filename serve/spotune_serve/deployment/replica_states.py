"""The replicas of each application: their states and pods, as Ray Serve's controller knows them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ReplicaDetails, ServeInstanceDetails

from spotune_serve.deployment.application_backend import REPLICA
from spotune_serve.gateway.backend import Replicas

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 3.0
_REUSE_SECONDS = 1.0


class ReplicaStates:
    """Asks Ray Serve's controller, once at a time: a lost controller must not block one thread per question.

    A replica is RUNNING only after the constructor of `Replica` has loaded the model (Ray Serve 2.60).

    Args:
        ask: asks the controller, and may block; None: it does not know yet.
        answer_seconds: how long to wait for the controller.
        reuse_seconds: how long an answer holds.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Replicas | None] | None = None,
        *,
        answer_seconds: float = _ANSWER_SECONDS,
        reuse_seconds: float = _REUSE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask or _ask_controller
        self._answer_seconds = answer_seconds
        self._reuse_seconds = reuse_seconds
        self._clock = clock
        self._question: asyncio.Task[Replicas | None] | None = None
        self._asked_at = 0.0

    async def __call__(self) -> Replicas | None:
        """The replicas; None: the controller does not answer, or is starting."""
        question = self._question
        if question is None or (question.done() and self._clock() - self._asked_at > self._reuse_seconds):
            self._asked_at = self._clock()
            question = self._question = asyncio.create_task(self._answer())
        if not question.done():
            await asyncio.wait({question}, timeout=self._answer_seconds)
        return question.result() if question.done() else None

    async def _answer(self) -> Replicas | None:
        try:
            return await asyncio.to_thread(self._ask)
        except Exception as error:  # of Ray, whose head may be lost; requests do not need it  # noqa: BLE001
            logger.warning("Ray Serve's controller does not report its replicas: %s", error)
            return None


def _ask_controller() -> Replicas | None:
    """The replicas; None while the controller, after a restart, does not know all applications yet."""
    own = serve.get_replica_context().app_name
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    # `serve.status` makes its answer of these details, and leaves out where the replicas are.
    applications = ServeInstanceDetails(**client.get_serve_details()).applications
    if own not in applications:
        return None
    found = {
        name: application.deployments[REPLICA].replicas
        for name, application in applications.items()
        if REPLICA in application.deployments
    }
    replicas = [replica for each in found.values() for replica in each]
    now = time.time()
    return Replicas(
        states={name: Counter(replica.state.value for replica in each) for name, each in found.items()},
        addresses=frozenset(replica.node_ip for replica in replicas if replica.node_ip),
        unplaced_seconds=max((_unplaced_seconds(replica, now) for replica in replicas), default=0.0),
    )


def _unplaced_seconds(replica: ReplicaDetails, now: float) -> float:
    """Seconds since Ray was asked to start a replica for which it has found no node; 0 if it has."""
    is_unplaced = replica.state.value == "STARTING" and not replica.node_ip and replica.start_time_s > 0
    return max(now - replica.start_time_s, 0.0) if is_unplaced else 0.0
