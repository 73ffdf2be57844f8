"""The gateway's backend: replicas behind a Ray Serve deployment handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError, RayError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from spotune_serve.engine.base import GenerationRequest, TokenChunk
from spotune_serve.gateway.backend import NoReplicaError, ReplicaLostError

_LOST = (RayActorError, WorkerCrashedError, ReplicaUnavailableError)
"""A replica died, was killed, or left before it took the request."""
_POLL_SECONDS = 5.0


class RayBackend:
    """Sends requests to the replicas of one deployment; Ray Serve chooses the least busy one.

    Args:
        handle: the `DeploymentHandle` of the replicas.
    """

    def __init__(self, handle: Any) -> None:
        self._generate = handle.options(stream=True).generate
        self._stats = handle.stats

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
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
        finally:
            if not finished:
                response.cancel()

    async def is_ready(self) -> bool:
        """Whether a replica answers."""
        with suppress(RayError, DeploymentUnavailableError, ReplicaUnavailableError, TimeoutError):
            await asyncio.wait_for(self._stats.remote(), _POLL_SECONDS)
            return True
        return False
