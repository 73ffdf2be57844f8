"""Answers: the sequences of a request generated side by side, as text, whole or in parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from spotune_serve.engine.base import (
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    PromptTooLongError,
    TokenChunk,
    UnknownAdapterError,
    UnsupportedFormatError,
    UnsupportedToolChoiceError,
)
from spotune_serve.gateway.answer_text import AnswerText, TokenDecoder
from spotune_serve.gateway.backend import Backend, NoReplicaError
from spotune_serve.gateway.metrics.gateway_metrics import VersionMetrics
from spotune_serve.gateway.sequence_timer import SequenceTimer
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from spotune_serve.gateway.streams import resumable
from spotune_serve.gateway.tracing import current_trace
from spotune_serve.protocol.errors import ApiError

logger = logging.getLogger(__name__)

_MIN_LOGPROB = -9999.0
"""Instead of minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class Choice:
    """One answer to generate.

    Attributes:
        index: its index in the response.
        request: the sequence.
        stops: stop strings.
    """

    index: int
    request: GenerationRequest
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScoredToken:
    """A token of an answer with its log probability.

    Attributes:
        text: the token alone.
        logprob: natural log probability.
        top: the most likely tokens and their log probabilities.
        offset: where it starts in the answer, in characters.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer.

    Attributes:
        choice: the answer's index.
        text: new text; may be empty.
        num_tokens: number of new tokens.
        scores: log probabilities of the new tokens, if the request has them.
        finish_reason: set in the last part.
    """

    choice: int
    text: str
    num_tokens: int
    scores: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None

    def with_next(self, part: AnswerPart) -> AnswerPart:
        """This part and the next one of the same answer as one."""
        return AnswerPart(
            self.choice,
            self.text + part.text,
            self.num_tokens + part.num_tokens,
            self.scores + part.scores,
            part.finish_reason,
        )


_Item = AnswerPart | asyncio.Task[None] | ApiError
"""A new part, a task that has finished, or the error that ends the request."""


@dataclass
class Answer:
    """A whole answer; fields as in `AnswerPart`."""

    text: str = ""
    num_tokens: int = 0
    scores: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason = "length"


class _Inbox:
    """What has happened to the answers of a request since it was looked at last."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._arrival: asyncio.Future[None] | None = None

    def put(self, item: _Item) -> None:
        """Add an item."""
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def take(self) -> list[_Item]:
        """All items, at least one. An answer whose parts arrived faster than they are read has one part."""
        if not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        items, self._items = self._items, []
        return items if len(items) == 1 else _joined(items)


def _joined(items: Iterable[_Item]) -> list[_Item]:
    found: dict[object, _Item] = {}
    for item in items:
        if isinstance(item, AnswerPart):
            first = found.get(item.choice)
            found[item.choice] = first.with_next(item) if isinstance(first, AnswerPart) else item
        else:
            found[item] = item
    return list(found.values())


class Answerer:
    """Generates answers with a backend, within the limits of the settings."""

    def __init__(
        self, model: ServedModel, backend: Backend, settings: GatewaySettings, metrics: VersionMetrics
    ) -> None:
        self._model = model
        self._backend = backend
        self._settings = settings
        self._metrics = metrics
        self._decoder = TokenDecoder(model.tokenizer)

    async def parts(self, choices: Sequence[Choice]) -> AsyncGenerator[AnswerPart, None]:
        """The answers in parts, as they are generated. Closing the iterator aborts all of them.

        Raises:
            ApiError: too many sequences wait, or the request takes too long.
            NoReplicaError: no replica takes or continues a sequence.
        """
        self._admit(len(choices))
        self._metrics.prompt_tokens.inc(sum(len(choice.request.prompt) for choice in choices))
        inbox = _Inbox()
        trace = current_trace()
        timers = [SequenceTimer(self._metrics, trace, choice.index, len(choice.request.prompt)) for choice in choices]
        tasks = [
            asyncio.create_task(self._run(choice, timer, inbox.put))
            for choice, timer in zip(choices, timers, strict=True)
        ]
        for task in tasks:
            task.add_done_callback(inbox.put)
        seconds = self._settings.request_timeout_seconds
        too_late = ApiError(504, f"The request took longer than {seconds:g} s.", code="request_timeout")
        deadline = asyncio.get_running_loop().call_later(seconds, inbox.put, too_late)
        unfinished = len(tasks)
        try:
            while unfinished:
                for item in await inbox.take():
                    if isinstance(item, AnswerPart):
                        yield item
                    elif isinstance(item, ApiError):
                        raise item
                    else:
                        unfinished -= 1
                        item.result()
        finally:
            deadline.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for timer in timers:
                timer.finish("abort")  # of tasks that were cancelled before they started

    def _admit(self, num_sequences: int) -> None:
        settings = self._settings
        if num_sequences > settings.max_sequences_per_request:
            raise ApiError(
                400, f"The request asks for {num_sequences} answers; at most {settings.max_sequences_per_request} are "
                "possible. Send several requests.",
                param="n",
            )  # fmt: skip
        waiting = self._metrics.waiting_now
        if waiting >= settings.max_waiting_requests:
            raise ApiError(
                429, f"{waiting} requests wait already. Try again later.",
                code="rate_limit_exceeded", headers={"Retry-After": str(settings.retry_after_seconds)},
            )  # fmt: skip

    async def _run(self, choice: Choice, timer: SequenceTimer, put: Callable[[AnswerPart], None]) -> None:
        """Generate one answer and pass on its parts."""
        sampling = choice.request.sampling
        eos_tokens: frozenset[int] = frozenset() if sampling.ignore_eos else self._model.eos_token_ids
        stop_tokens = eos_tokens | set(sampling.stop_token_ids)
        text = AnswerText(self._decoder, choice.stops, stop_tokens)
        stream = resumable(
            self._backend,
            choice.request,
            timeout_seconds=self._settings.replica_timeout_seconds,
            retry_seconds=self._settings.retry_seconds,
            stop_tokens=stop_tokens,
            on_resumption=timer.add_resumption,
        )
        reason: str | None = None
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    timer.add_tokens(len(chunk.tokens))
                    part = self._part(choice.index, text, chunk)
                    put(part)
                    reason = part.finish_reason
                    if reason is not None:
                        break
        except asyncio.CancelledError:
            reason = "abort"
            raise
        finally:
            timer.finish(reason)

    def _part(self, index: int, text: AnswerText, chunk: TokenChunk) -> AnswerPart:
        """A chunk as text. The answer stops early at a stop string."""
        pieces: list[str] = []
        scores: list[ScoredToken] = []
        num_tokens = 0
        for token in chunk.tokens:
            num_tokens += 1
            if token.logprob is not None:
                scores.append(self._score(token, text.length))
            is_last = chunk.finish_reason == "stop" and num_tokens == len(chunk.tokens)
            pieces.append(text.push(token.token, last=is_last))
            if text.stopped:
                break
        if chunk.finish_reason is not None and not text.stopped:
            pieces.append(text.flush())
        reason: FinishReason | None = "stop" if text.stopped else chunk.finish_reason
        return AnswerPart(index, "".join(pieces), num_tokens, tuple(scores), reason)

    def _score(self, token: GeneratedToken, offset: int) -> ScoredToken:
        top = tuple((self._decoder.decode_one(item.token), max(item.logprob, _MIN_LOGPROB)) for item in token.top)
        logprob = max(token.logprob or 0.0, _MIN_LOGPROB)
        return ScoredToken(self._decoder.decode_one(token.token), logprob, top, offset)


async def collect(choices: Sequence[Choice], parts: AsyncGenerator[AnswerPart, None]) -> list[Answer]:
    """The whole answers of `Answerer.parts`, in the order of the choices."""
    answers = {choice.index: Answer() for choice in choices}
    async with aclosing(parts):
        async for part in parts:
            answer = answers[part.choice]
            answer.text += part.text
            answer.num_tokens += part.num_tokens
            answer.scores += part.scores
            answer.finish_reason = part.finish_reason or answer.finish_reason
    return [answers[choice.index] for choice in choices]


def api_error_of(error: Exception, settings: GatewaySettings) -> ApiError:
    """How the API reports an error. An unexpected one is logged, and its text is not sent to the client."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return ApiError(400, _own_text(error), code="context_length_exceeded")
        case UnknownAdapterError():
            return ApiError(404, _own_text(error), param="model", code="model_not_found")
        case UnsupportedToolChoiceError():
            return ApiError(400, f"tool_choice: {_own_text(error)}", param="tool_choice")
        case UnsupportedFormatError():
            return ApiError(400, f"response_format: {_own_text(error)}", param="response_format")
        case NoReplicaError():
            headers = {"Retry-After": str(settings.retry_after_seconds)}
            return ApiError(503, f"No replica is ready: {error}", code="no_replica", headers=headers)
        case _:
            logger.error("request failed", exc_info=error)
            return ApiError(500, "The request failed. The log of the service has the reason.", code="internal_error")


def _own_text(error: Exception) -> str:
    """The message of an error. Ray's text of a replica's error is a traceback; the error itself is its `cause`."""
    return str(getattr(error, "cause", error))
