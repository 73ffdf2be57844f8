"""The gateway's backend: replicas behind a Ray Serve deployment handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from spotune_serve.engine.base import EngineLostError, GenerationRequest, TokenChunk
from spotune_serve.gateway.backend import NoReplicaError, ReplicaLostError

_LOST = (
    RayActorError,
    WorkerCrashedError,
    OutOfMemoryError,
    ObjectLostError,
    ReplicaUnavailableError,
    EngineLostError,
)
"""A replica died or was killed (also by Ray's memory monitor), its node was lost together with a chunk, it left before
it took the request, or the process of its engine died."""
_POLL_SECONDS = 5.0


class RayBackend:
    """Sends requests to the replicas of one deployment; Ray Serve chooses the least busy one.

    Args:
        handle: the `DeploymentHandle` of the replicas.
        scales_to_zero: whether it is no fault that there is no replica.
    """

    def __init__(self, handle: Any, *, scales_to_zero: bool = False) -> None:
        self._scales_to_zero = scales_to_zero
        self._generate = handle.options(stream=True).generate
        self._stats = handle.stats

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The new tokens of a sequence. Closing the iterator aborts the sequence on its replica.

        Raises:
            ReplicaLostError: the replica died or left.
            NoReplicaError: the deployment has failed and has no replica.
        """
        response = self._generate.remote(request)
        finished = False
        try:
            async for chunk in response:
                finished = chunk.finish_reason is not None
                yield chunk
        except _LOST as error:
            finished = True
            raise ReplicaLostError(f"the replica of request {request.request_id} was lost: {error}") from error
        except DeploymentUnavailableError as error:
            finished = True
            raise NoReplicaError(str(error.message)) from error
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # Ray reports a call that was cancelled at the replica's side in the same way as our own cancellation.
            finished = True
            raise ReplicaLostError(f"the replica cancelled request {request.request_id}") from error
        finally:
            if not finished:
                response.cancel()

    async def is_ready(self) -> bool:
        """Whether a replica answers, or would be started by a request.

        Where the service scales to zero, replicas are not asked: each question counts as a request, so health checks
        would start a replica and keep it.
        """
        if self._scales_to_zero:
            return True
        with suppress(RayError, DeploymentUnavailableError, ReplicaUnavailableError, TimeoutError):
            await asyncio.wait_for(self._stats.remote(), _POLL_SECONDS)
            return True
        return False


def _is_cancelled() -> bool:
    """Whether somebody cancels the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
