"""The gateway's backend: replicas behind a Ray Serve deployment handle.

Ray Serve chooses the replica of a request, carries the request and its errors, and counts it as long as it runs. The
tokens come by a TCP connection of their own: Ray's stream costs more processor time for a token than all else that the
gateway does for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Any

from grpc import RpcError
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from spotune_serve.deployment.token_transport.receiver import ConnectionLostError, TokenReceiver, TokenSequence
from spotune_serve.deployment.token_transport.sender import GatewayLostError
from spotune_serve.engine.base import EngineLostError, GenerationRequest, TokenChunk
from spotune_serve.gateway.backend import NoReplicaError, ReplicaLostError

_LOST = (
    RayActorError,
    WorkerCrashedError,
    OutOfMemoryError,
    ObjectLostError,
    ReplicaUnavailableError,
    TaskCancelledError,
    RpcError,
    EngineLostError,
    ConnectionLostError,
    GatewayLostError,
)
"""A replica died or was killed (also by Ray's memory monitor), its node was lost, it left before it took the request,
it cancelled the call as it ended, the process of its engine died, or the connection with its tokens broke: either end
may be the first to notice."""
_POLL_SECONDS = 5.0


class RayBackend:
    """Sends requests to the replicas of one deployment; Ray Serve chooses the least busy one.

    Args:
        handle: the `DeploymentHandle` of the replicas.
        receiver: where their tokens arrive.
        scales_to_zero: whether it is no fault that there is no replica.
    """

    def __init__(self, handle: Any, receiver: TokenReceiver, *, scales_to_zero: bool = False) -> None:
        self._scales_to_zero = scales_to_zero
        self._generate = handle.generate
        self._stats = handle.stats
        self._receiver = receiver

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The new tokens of a sequence. Closing the iterator aborts the sequence on its replica.

        Raises:
            ReplicaLostError: the replica died or left.
            NoReplicaError: the deployment has failed and has no replica.
        """
        await self._receiver.start()
        with self._receiver.sequence() as (destination, sequence):
            response = self._generate.remote(request, destination)
            call = asyncio.ensure_future(response)
            call.add_done_callback(partial(_report_failure, sequence))
            finished = False
            try:
                while not finished:
                    chunk = await sequence.read()
                    finished = chunk.finish_reason is not None
                    yield chunk
            except _LOST as error:
                raise ReplicaLostError(f"the replica of request {request.request_id} was lost: {error}") from error
            except DeploymentUnavailableError as error:
                raise NoReplicaError(str(error.message)) from error
            finally:
                if not finished and not call.done():
                    response.cancel()

    async def is_ready(self) -> bool:
        """Whether a replica answers, or would be started by a request.

        Where the service scales to zero, replicas are not asked: each question counts as a request, so health checks
        would start a replica and keep it.
        """
        if self._scales_to_zero:
            return True
        with suppress(RayError, RpcError, DeploymentUnavailableError, ReplicaUnavailableError, TimeoutError):
            await asyncio.wait_for(self._stats.remote(), _POLL_SECONDS)
            return True
        return False


def _report_failure(sequence: TokenSequence, call: asyncio.Future[None]) -> None:
    """Tell the reader of a sequence why its call failed. The tokens of a call that did not fail are on their way."""
    if call.cancelled():
        sequence.fail(TaskCancelledError(error_message="the replica cancelled the call"))
    elif (error := call.exception()) is not None:
        sequence.fail(error)
