"""How many replicas each application has, by Ray Serve's state, as its controller knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ray import serve

from spotune_serve.deployment.application_backend import REPLICA
from spotune_serve.gateway.backend import StatesByApplication

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
        ask: Callable[[], StatesByApplication | None] | None = None,
        *,
        answer_seconds: float = _ANSWER_SECONDS,
        reuse_seconds: float = _REUSE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask or _ask_controller
        self._answer_seconds = answer_seconds
        self._reuse_seconds = reuse_seconds
        self._clock = clock
        self._question: asyncio.Task[StatesByApplication | None] | None = None
        self._asked_at = 0.0

    async def __call__(self) -> StatesByApplication | None:
        """Number of replicas by application and state; None: the controller does not answer, or is starting."""
        question = self._question
        if question is None or (question.done() and self._clock() - self._asked_at > self._reuse_seconds):
            self._asked_at = self._clock()
            question = self._question = asyncio.create_task(self._answer())
        if not question.done():
            await asyncio.wait({question}, timeout=self._answer_seconds)
        return question.result() if question.done() else None

    async def _answer(self) -> StatesByApplication | None:
        try:
            return await asyncio.to_thread(self._ask)
        except Exception as error:  # of Ray, whose head may be lost; requests do not need it  # noqa: BLE001
            logger.warning("Ray Serve's controller does not report its replicas: %s", error)
            return None


def _ask_controller() -> StatesByApplication | None:
    """The states; None while the controller, after a restart, does not know all applications yet."""
    own = serve.get_replica_context().app_name
    applications = serve.status().applications
    if own not in applications:
        return None
    return {
        name: {str(state): count for state, count in application.deployments[REPLICA].replica_states.items()}
        for name, application in applications.items()
        if REPLICA in application.deployments
    }
