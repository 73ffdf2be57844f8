"""A stream that loses its replica continues with the tokens that it would have had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from spotune_serve.engine.base import GenerationRequest, SamplingParams, TokenChunk
from spotune_serve.gateway.backend import NoReplicaError, VersionGoneError
from spotune_serve.gateway.streams import resumable
from tests.serve.support.scripted_backend import ScriptedBackend

TOKENS = [10, 11, 12, 12, 13, 14, 15]
EOS = 1


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_request(max_tokens: int = 50) -> GenerationRequest:
    return GenerationRequest("r", (5, 6), SamplingParams(max_tokens=max_tokens, seed=3))


def play(backend: ScriptedBackend, request: GenerationRequest | None = None) -> tuple[list[int], str | None, int]:
    """Tokens, finish reason and number of resumptions."""
    tokens: list[int] = []
    reasons: list[str | None] = []
    resumptions: list[None] = []
    time = FakeTime()

    async def read() -> None:
        stream = resumable(
            backend,
            request or make_request(),
            timeout_seconds=5.0,
            retry_seconds=1.0,
            stop_tokens={EOS},
            on_resumption=lambda: resumptions.append(None),
            clock=time.clock,
            sleep=time.sleep,
        )
        async for chunk in stream:
            tokens.extend(token.token for token in chunk.tokens)
            reasons.append(chunk.finish_reason)

    asyncio.run(read())
    return tokens, reasons[-1], len(resumptions)


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("lost_after", range(len(TOKENS) + 2))
def test_a_stream_lost_at_any_token_equals_the_undisturbed_one(lost_after: int, chunk_size: int) -> None:
    backend = ScriptedBackend(TOKENS, losses=[lost_after], chunk_size=chunk_size)
    tokens, reason, resumptions = play(backend)
    assert (tokens, reason) == ([*TOKENS, EOS], "stop")
    assert resumptions == (lost_after <= len(TOKENS))  # after the last token there is nothing to ask for
    assert len({request.sampling.seed for request in backend.requests}) == 1


def test_a_stream_that_loses_a_replica_after_every_token_gets_through() -> None:
    backend = ScriptedBackend(TOKENS, losses=[1] * len(TOKENS))
    assert play(backend) == ([*TOKENS, EOS], "stop", len(TOKENS))
    assert [request.generated for request in backend.requests] == [tuple(TOKENS[:n]) for n in range(len(TOKENS) + 1)]


def test_a_request_continues_tokens_that_it_brings() -> None:
    request = GenerationRequest("r", (5,), SamplingParams(max_tokens=50, seed=3), generated=(10, 11))
    assert play(ScriptedBackend(TOKENS, losses=[2]), request)[0] == [*TOKENS[2:], EOS]


@pytest.mark.parametrize("fault", [{"dropped": 1}, {"repeated": 1}])
def test_a_replica_that_drops_or_repeats_a_token_is_noticed(fault: dict[str, int]) -> None:
    """Control: the comparison of the tests above can fail."""
    tokens, _, _ = play(ScriptedBackend(TOKENS, losses=[3], **fault))
    assert tokens != [*TOKENS, EOS]


def test_a_replica_lost_after_the_last_token_is_not_asked_again() -> None:
    backend = ScriptedBackend(TOKENS, losses=[3])
    assert play(backend, make_request(max_tokens=3)) == (TOKENS[:3], "length", 0)
    assert len(backend.requests) == 1


def test_replicas_lost_without_a_token_fail_the_request_in_time() -> None:
    backend = ScriptedBackend(TOKENS, losses=[2] + [0] * 99)
    with pytest.raises(NoReplicaError, match="within 5 s"):
        play(backend)
    assert len(backend.requests) == 6


def test_each_token_starts_the_time_limit_again() -> None:
    losses: Sequence[int | None] = [1, 0, 0, 0] * len(TOKENS)
    assert play(ScriptedBackend(TOKENS, losses=losses))[0] == [*TOKENS, EOS]


def test_a_new_request_without_a_replica_fails_at_once() -> None:
    backend = ScriptedBackend(TOKENS)
    backend.ready = False
    with pytest.raises(NoReplicaError, match="starting"):
        play(backend)
    assert len(backend.requests) == 1


@pytest.mark.parametrize("lost_after", [0, 3])
def test_a_request_whose_version_is_gone_does_not_wait(lost_after: int) -> None:
    """Its replica was lost first, so it is no new request."""

    class Deleted(ScriptedBackend):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            if self.requests:
                self.error = VersionGoneError("deleted")
            async for chunk in super().generate(request):
                yield chunk

    backend = Deleted(TOKENS, losses=[lost_after])
    with pytest.raises(VersionGoneError):
        play(backend)
    assert len(backend.requests) == 2


def test_leaving_a_stream_aborts_the_sequence() -> None:
    backend = ScriptedBackend(TOKENS)

    async def leave() -> None:
        stream = resumable(backend, make_request(), timeout_seconds=5.0)
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert backend.closed == 1
