"""Send requests to an engine or a scheduler, and collect what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import PreTrainedModel

from spotune_serve.engine.base import (
    Engine,
    FinishReason,
    GeneratedToken,
    GenerationError,
    GenerationRequest,
    SamplingParams,
    TokenChunk,
)
from spotune_serve.engine.decoding_batch import Sequence as EngineSequence
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.transformers_engine import TransformersEngine

Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    """What a sequence generated."""

    generated: tuple[GeneratedToken, ...]
    finish_reason: FinishReason | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(generated.token for generated in self.generated)


@dataclass
class Collected:
    """Takes what a scheduler delivers."""

    chunks: list[TokenChunk] = field(default_factory=list)
    errors: list[GenerationError] = field(default_factory=list)

    def __call__(self, item: TokenChunk | GenerationError) -> None:
        if isinstance(item, TokenChunk):
            self.chunks.append(item)
        else:
            self.errors.append(item)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(generated.token for chunk in self.chunks for generated in chunk.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.chunks[-1].finish_reason if self.chunks else None


def request(
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    generated: Sequence[int] = (),
    adapter: str = "",
    **sampling: Any,
) -> GenerationRequest:
    """A request, greedy unless a temperature is given. Other keyword arguments are sampling parameters."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature, **sampling)
    return GenerationRequest("a-request", tuple(prompt), params, tuple(generated), adapter)


async def answer(engine: Engine, asked: GenerationRequest) -> Answer:
    """All tokens of a sequence. Checks that exactly the last chunk has a finish reason."""
    chunks = [chunk async for chunk in engine.generate(asked)]
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return Answer(tuple(token for chunk in chunks for token in chunk.tokens), chunks[-1].finish_reason)


async def answers(engine: Engine, asked: Sequence[GenerationRequest]) -> list[Answer]:
    """The answers to concurrent requests."""
    return list(await asyncio.gather(*(answer(engine, each) for each in asked)))


def with_engine(
    model: PreTrainedModel | LoadedModel, use: Callable[[TransformersEngine], Awaitable[Result]], **limits: int
) -> Result:
    """What `use` returns for an engine of the model, which is closed afterwards."""

    async def run() -> Result:
        async with running_engine(model, **limits) as engine:
            return await use(engine)

    return asyncio.run(run())


@asynccontextmanager
async def running_engine(model: PreTrainedModel | LoadedModel, **limits: int) -> AsyncIterator[TransformersEngine]:
    """An engine of the model, which is closed afterwards."""
    loaded = model if isinstance(model, LoadedModel) else LoadedModel(model)
    sizes: Any = limits
    engine = TransformersEngine(loaded, **sizes)
    try:
        yield engine
    finally:
        await engine.close()


def ask(
    model: PreTrainedModel | LoadedModel, asked: Sequence[GenerationRequest], **limits: int
) -> list[tuple[int, ...]]:
    """The tokens that an engine answers to concurrent requests."""
    found = with_engine(model, lambda engine: answers(engine, asked), **limits)
    return [each.tokens for each in found]


def sequence(model: LoadedModel, asked: GenerationRequest, deliver: Collected) -> EngineSequence:
    """A request as the scheduler takes it."""
    settings, limit = model.settings, asked.sampling.max_tokens
    return EngineSequence(
        request=asked,
        limit=limit,
        start=settings.decoder_start or asked.prompt,
        encoder_length=len(asked.prompt) if model.seq2seq else 0,
        stop_token_ids=settings.eos_token_ids,
        processors=settings.logits_processors(asked.prompt, limit, model.device),
        deliver=deliver,
    )
