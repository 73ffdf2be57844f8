"""A backend that plays lists of tokens, and loses its replica wherever a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from spotune_serve.engine.base import (
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    TokenChunk,
    TokenLogprob,
)
from spotune_serve.gateway.backend import NoReplicaError, ReplicaLostError

Script = Callable[[GenerationRequest], Sequence[int]]


class ScriptedBackend:
    """Plays the tokens of a script, the last of which is an end-of-text token.

    Args:
        script: tokens of the answer, or a function from a request to them.
        eos: the end-of-text token, which a script need not have.
        chunk_size: tokens per chunk.
        losses: for each attempt, after how many new tokens the replica is lost; None: it is not.
        dropped: tokens that a broken replica drops when it continues a sequence.
        repeated: tokens that a broken replica repeats when it continues a sequence.

    Attributes:
        requests: every request, in order.
        closed: number of streams that were left early.
    """

    def __init__(
        self,
        script: Sequence[int] | Script,
        *,
        eos: int = 1,
        chunk_size: int = 1,
        losses: Sequence[int | None] = (),
        dropped: int = 0,
        repeated: int = 0,
    ) -> None:
        self._script = script
        self._eos = eos
        self._chunk_size = chunk_size
        self._losses = list(losses)
        self._shift = dropped - repeated
        self.requests: list[GenerationRequest] = []
        self.closed = 0
        self.ready = True
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        """While it is not set, chunks from number `gate_at` on wait."""
        self.gate_at = 1

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        if not self.ready:
            raise NoReplicaError("all replicas are starting")
        loss = self._losses.pop(0) if self._losses else None
        finished = False
        try:
            for number, chunk in enumerate(self._chunks(request, loss)):
                if number >= self.gate_at and self.gate is not None:
                    await self.gate.wait()
                finished = chunk.finish_reason is not None
                yield chunk
                await asyncio.sleep(0)
            if not finished:
                finished = True
                raise ReplicaLostError("the node was taken away")
        finally:
            self.closed += not finished

    def _chunks(self, request: GenerationRequest, loss: int | None) -> list[TokenChunk]:
        script = list(self._script(request) if callable(self._script) else self._script)
        tokens = [*script, self._eos][: request.sampling.max_tokens]
        reason: FinishReason = "stop" if len(tokens) == len(script) + 1 else "length"
        start = len(request.generated) + (self._shift if request.generated else 0)
        new = tokens[max(start, 0) :]
        sent = new if loss is None else new[:loss]
        chunks = []
        for position in range(0, len(sent), self._chunk_size):
            part = sent[position : position + self._chunk_size]
            is_last = loss is None and position + len(part) == len(new)
            generated = tuple(_with_logprobs(token, request.sampling.logprobs) for token in part)
            chunks.append(TokenChunk(generated, reason if is_last else None))
        return chunks

    async def is_ready(self) -> bool:
        return self.ready


def _with_logprobs(token: int, count: int | None) -> GeneratedToken:
    if count is None:
        return GeneratedToken(token)
    top = [TokenLogprob(token, -0.5), *(TokenLogprob(3 + k, -1.5 - k) for k in range(count))]
    return GeneratedToken(token, -0.5, tuple(top[:count]))
