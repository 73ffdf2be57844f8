"""The handle of a Ray Serve deployment whose replicas play a script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Self

from spotune_serve.engine.base import EngineStats, GenerationRequest, TokenChunk
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
        self.cancelled = 0
        self.questions = 0

    def options(self, *, stream: bool) -> Self:
        assert stream
        return self

    @property
    def generate(self) -> Any:
        return _Method(lambda request: _Response(self, request))

    @property
    def stats(self) -> Any:
        return _Method(self._answer_stats)

    async def _answer_stats(self) -> EngineStats:
        self.questions += 1
        if not self._backend.ready:
            raise TimeoutError
        return EngineStats(0, 0, 0)

    async def play(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        try:
            async for chunk in self._backend.generate(request):
                yield chunk
        except ReplicaLostError as error:
            raise self._loss from error


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class _Response:
    def __init__(self, handle: ScriptedHandle, request: GenerationRequest) -> None:
        self._handle = handle
        self._chunks = handle.play(request)

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self._chunks

    def cancel(self) -> None:
        self._handle.cancelled += 1
