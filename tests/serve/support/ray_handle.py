"""The handle of a Ray Serve deployment whose replicas play a script, and send its tokens as real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from spotune_serve.deployment.token_transport.messages import Destination
from spotune_serve.deployment.token_transport.sender import TokenSender
from spotune_serve.engine.base import EngineStats, GenerationRequest
from spotune_serve.gateway.backend import ReplicaLostError
from tests.serve.support.scripted_backend import ScriptedBackend


class ScriptedHandle:
    """What `RayBackend` uses of a `DeploymentHandle`.

    Args:
        backend: plays the tokens.
        loss: what Ray raises where the script loses its replica.

    Attributes:
        cancelled: number of responses that were cancelled.
        questions: number of calls of `stats`.
    """

    def __init__(self, backend: ScriptedBackend, loss: BaseException) -> None:
        self._backend = backend
        self._loss = loss
        self._sender = TokenSender()
        self.cancelled = 0
        self.questions = 0

    @property
    def generate(self) -> Any:
        return _Method(lambda request, destination: _Response(self, request, destination))

    @property
    def stats(self) -> Any:
        return _Method(self._answer_stats)

    async def _answer_stats(self) -> EngineStats:
        self.questions += 1
        if not self._backend.ready:
            raise TimeoutError
        return EngineStats(0, 0, 0)

    async def play(self, request: GenerationRequest, destination: Destination) -> None:
        sender = await self._sender.open(destination)
        try:
            async for chunk in self._backend.generate(request):
                sender.send(chunk)
        except ReplicaLostError as error:
            raise self._loss from error


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class _Response:
    def __init__(self, handle: ScriptedHandle, request: GenerationRequest, destination: Destination) -> None:
        self._handle = handle
        self._call = asyncio.ensure_future(handle.play(request, destination))

    def __await__(self) -> Generator[Any, None, None]:
        return self._call.__await__()

    def cancel(self) -> None:
        self._handle.cancelled += 1
        self._call.cancel()
