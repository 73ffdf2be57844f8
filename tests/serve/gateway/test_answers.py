"""Parts of answers that wait for their reader become one part, and nothing is lost or changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from spotune_serve.engine.base import GenerationRequest, SamplingParams
from spotune_serve.gateway.answers import Answer, Answerer, AnswerPart, Choice, collect
from spotune_serve.gateway.metrics.gateway_metrics import GatewayMetrics
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from spotune_serve.protocol.errors import ApiError
from tests.serve.support.gateway_client import tokens_of
from tests.serve.support.scripted_backend import ScriptedBackend

TEXT = "SELECT count(*) FROM singer: é€😀 done"


def answerer(
    model: ServedModel, backend: ScriptedBackend, counts_folder: Path | None = None, **settings: float
) -> Answerer:
    metrics = GatewayMetrics("tiny", folder=counts_folder).of("1")
    return Answerer(model, backend, GatewaySettings(retry_seconds=0, **settings), metrics)  # type: ignore[arg-type]


def choices(count: int, *stops: str) -> list[Choice]:
    sampling = SamplingParams(max_tokens=99, seed=0, logprobs=2)
    return [Choice(index, GenerationRequest(f"r-{index}", (5,), sampling), stops) for index in range(count)]


async def read(found: Answerer, asked: list[Choice], parts: list[AnswerPart], rounds: int = 0) -> list[AnswerPart]:
    """The parts, if the reader lets the event loop run this often between two of them."""
    async with aclosing(found.parts(asked)) as arriving:
        async for part in arriving:
            parts.append(part)
            for _ in range(rounds):
                await asyncio.sleep(0)
    return parts


def answers_of(parts: list[AnswerPart], asked: list[Choice]) -> list[Answer]:
    async def replayed() -> AsyncGenerator[AnswerPart, None]:
        for part in parts:
            yield part

    return asyncio.run(collect(asked, replayed()))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("stops", [(), (" FROM", "zzz"), ("€😀",)])
@pytest.mark.parametrize("losses", [[], [3, 2]])
def test_a_slow_reader_gets_the_same_answers_in_fewer_parts(
    chat_model: ServedModel, count: int, stops: tuple[str, ...], losses: list[int]
) -> None:
    asked = choices(count, *stops)
    backend = ScriptedBackend(tokens_of(chat_model, TEXT), losses=losses)
    fast = asyncio.run(read(answerer(chat_model, backend), asked, []))
    backend = ScriptedBackend(tokens_of(chat_model, TEXT), losses=losses)
    slow = asyncio.run(read(answerer(chat_model, backend), asked, [], 60))
    assert len(slow) < len(fast)
    assert answers_of(slow, asked) == answers_of(fast, asked)
    assert sum(part.finish_reason == "stop" for part in slow) == count
    assert all(len(part.scores) == part.num_tokens for part in slow)


def test_the_parts_before_the_time_limit_are_delivered(chat_model: ServedModel) -> None:
    backend = ScriptedBackend(tokens_of(chat_model, TEXT))
    backend.gate, backend.gate_at = asyncio.Event(), 4
    found = answerer(chat_model, backend, request_timeout_seconds=1.0)
    parts: list[AnswerPart] = []
    with pytest.raises(ApiError, match="longer than"):
        asyncio.run(read(found, choices(1), parts))
    assert sum(part.num_tokens for part in parts) == 4
    assert backend.closed == 1


def test_the_waiting_requests_of_all_gateway_processes_count_for_the_limit(
    chat_model: ServedModel, tmp_path: Path
) -> None:
    backend = ScriptedBackend(tokens_of(chat_model, TEXT))
    backend.gate, backend.gate_at = asyncio.Event(), 0

    async def ask_both() -> list[AnswerPart]:
        first, second = (answerer(chat_model, backend, tmp_path, max_waiting_requests=2) for _ in range(2))
        waiting = asyncio.create_task(read(first, choices(2), []))
        while len(backend.requests) < 2:  # noqa: ASYNC110 - the backend has no event for it
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests wait already"):
            await read(second, choices(1), [])
        assert backend.gate is not None
        backend.gate.set()
        await waiting
        return await read(second, choices(1), [])

    assert asyncio.run(ask_both())[-1].finish_reason == "stop"
