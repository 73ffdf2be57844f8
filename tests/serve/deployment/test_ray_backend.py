"""What Ray raises when a replica is lost, and what the gateway makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import ReplicaUnavailableError

from spotune_serve.deployment.token_transport.ray_backend import RayBackend
from spotune_serve.deployment.token_transport.receiver import ConnectionLostError, TokenReceiver
from spotune_serve.deployment.token_transport.sender import GatewayLostError
from spotune_serve.engine.base import (
    EngineLostError,
    GenerationError,
    GenerationRequest,
    SamplingParams,
    UnsupportedFormatError,
)
from spotune_serve.gateway.answers import api_error_of
from spotune_serve.gateway.settings import GatewaySettings
from spotune_serve.gateway.streams import resumable
from tests.serve.support.ray_handle import ScriptedHandle
from tests.serve.support.scripted_backend import ScriptedBackend

TOKENS = [10, 11, 12, 13, 14]
EOS = 1
LOSSES = {
    "killed after its drain time": ActorDiedError(),
    "unreachable": ActorUnavailableError("the node does not answer", None),
    "killed by the memory monitor": OutOfMemoryError("the node is low on memory"),
    "node lost with a chunk": ObjectLostError("00", None, ""),
    "worker crashed": WorkerCrashedError(),
    "left before it took the request": ReplicaUnavailableError("replica"),
    "process of its engine died": RayTaskError("generate", "", EngineLostError("killed")).as_instanceof_cause(),
    "cancelled by its replica": asyncio.CancelledError(),
    "cancelled by Ray": TaskCancelledError(),
    "its replica lost the connection": RayTaskError("generate", "", GatewayLostError("broken")).as_instanceof_cause(),
    "the gateway lost the connection": ConnectionLostError("broken"),
}


def make_request() -> GenerationRequest:
    return GenerationRequest("r", (5, 6), SamplingParams(max_tokens=50, seed=3))


@asynccontextmanager
async def connected(handle: ScriptedHandle, *, scales_to_zero: bool = False) -> AsyncIterator[RayBackend]:
    receiver = TokenReceiver("127.0.0.1")
    try:
        yield RayBackend(handle, receiver, scales_to_zero=scales_to_zero)
    finally:
        receiver.close()


async def tokens_of(handle: ScriptedHandle) -> list[int]:
    async with connected(handle) as backend:
        stream = resumable(backend, make_request(), timeout_seconds=5.0, retry_seconds=0.0, stop_tokens={EOS})
        return [token.token async for chunk in stream for token in chunk.tokens]


async def is_ready(handle: ScriptedHandle, *, scales_to_zero: bool = False) -> bool:
    async with connected(handle, scales_to_zero=scales_to_zero) as backend:
        return await backend.is_ready()


@pytest.mark.parametrize("lost_after", [0, 2])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_sequence_continues_after_any_loss_of_its_replica(loss: BaseException, lost_after: int) -> None:
    played = ScriptedBackend(TOKENS, losses=[lost_after])
    handle = ScriptedHandle(played, loss)
    assert asyncio.run(tokens_of(handle)) == [*TOKENS, EOS]
    assert [request.generated for request in played.requests] == [(), tuple(TOKENS[:lost_after])]
    assert handle.cancelled == 0


def test_an_error_of_the_engine_is_no_loss() -> None:
    """The same request would fail at the next replica, too."""
    error = RayTaskError("generate", "traceback", GenerationError("NaN")).as_instanceof_cause()
    played = ScriptedBackend(TOKENS, losses=[2])
    with pytest.raises(GenerationError):
        asyncio.run(tokens_of(ScriptedHandle(played, error)))
    assert len(played.requests) == 1


def test_a_refusal_of_the_engine_has_its_own_words() -> None:
    """Ray's text of an error of a replica is a traceback."""
    refusal = UnsupportedFormatError("this service runs on vLLM")
    error = RayTaskError("generate", "Traceback (most recent call last)", refusal).as_instanceof_cause()
    found = api_error_of(error, GatewaySettings())
    assert (found.status, found.message, found.param) == (400, f"response_format: {refusal}", "response_format")


def test_a_cancelled_request_is_cancelled_at_its_replica_and_does_not_continue() -> None:
    played = ScriptedBackend(TOKENS)
    played.gate = asyncio.Event()  # the second token never comes
    handle = ScriptedHandle(played, ActorDiedError())

    async def cancel() -> None:
        begun = asyncio.Event()

        async def read(backend: RayBackend) -> None:
            async for _ in resumable(backend, make_request(), timeout_seconds=5.0, stop_tokens={EOS}):
                begun.set()

        async with connected(handle) as backend:
            task = asyncio.create_task(read(backend))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel())
    assert (handle.cancelled, len(played.requests)) == (1, 1)


@pytest.mark.parametrize("ready", [True, False])
def test_a_service_is_ready_when_a_replica_answers(ready: bool) -> None:
    played = ScriptedBackend(TOKENS)
    played.ready = ready
    assert asyncio.run(is_ready(ScriptedHandle(played, ActorDiedError()))) == ready


def test_health_checks_do_not_wake_a_service_that_scaled_to_zero() -> None:
    played = ScriptedBackend(TOKENS)
    played.ready = False
    handle = ScriptedHandle(played, ActorDiedError())
    assert asyncio.run(is_ready(handle, scales_to_zero=True))
    assert handle.questions == 0
