"""`/v1/completions` and `/v1/chat/completions`: OpenAI's requests as sequences, and answers as OpenAI's responses."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from spotune_serve.engine.base import GenerationRequest, SamplingParams, ToolCallFormat
from spotune_serve.gateway.answers import Answer, AnswerPart, Choice, ScoredToken
from spotune_serve.gateway.routes.responses import Plan, respond
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.tracing import current_trace
from spotune_serve.gateway.versions import Versions
from spotune_serve.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatFinishReason,
    ChatLogprobs,
    ChatRequest,
    FunctionCall,
    TokenLogprobs,
    ToolCall,
    TopLogprob,
)
from spotune_serve.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from spotune_serve.protocol.sampling import SamplingFields
from spotune_serve.protocol.sse import TextBodies, json_of
from spotune_serve.protocol.tool_calls import ParsedCall, ToolCallParser, call_frame
from spotune_serve.protocol.usage import Usage

_MAX_SEED = 1 << 63
_INCOMPLETE = "\ufffd"


def openai_routes(versions: Versions) -> APIRouter:
    """The routes of completions and chat completions."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=Completion)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        def plan(model: ServedModel) -> Plan:
            prompts = [
                model.encode_text(prompt) if isinstance(prompt, str) else model.check_length(prompt, "prompt")
                for prompt in body.prompts
            ]
            limit = body.max_tokens or DEFAULT_MAX_TOKENS
            choices = plan_choices(model, body, prompts, limit, body.logprobs, request.state.request_id)
            return Plan(choices, CompletionWriter(body, prompts, request.state.request_id))

        return await respond(versions, request, body.model, plan, stream=bool(body.stream))

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat(body: ChatRequest, request: Request) -> Response:
        messages = [message.as_template_value() for message in body.messages]

        def plan(model: ServedModel) -> Plan:
            prompt = model.encode_chat(messages, body.usable_tools, body.tool_choice)
            limit = body.answer_limit or model.default_chat_tokens
            choices = plan_choices(model, body, [prompt], limit, body.num_logprobs, request.state.request_id)
            return Plan(force_calls(choices, body), ChatWriter(body, prompt, request.state.request_id))

        return await respond(versions, request, body.model, plan, stream=bool(body.stream))

    return router


def plan_choices(
    model: ServedModel,
    body: SamplingFields,
    prompts: Sequence[list[int]],
    max_tokens: int,
    logprobs: int | None,
    request_id: str,
) -> list[Choice]:
    """The sequences of a request: `n` for each prompt.

    Each has a seed, so that it continues on another replica with the tokens that it would have had.

    Raises:
        ApiError: there is no such model.
    """
    adapter = model.adapter(body.model)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=model.check_tokens(body.biases, "logit_bias"),
        logprobs=logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        json_schema=body.answer_schema,
    )
    n = body.n or 1
    trace = current_trace()
    if trace is not None:
        trace.start(body.model, sampling, sum(map(len, prompts)), n * len(prompts))
    choices = []
    for number, prompt in enumerate(prompts):
        seed = secrets.randbelow(_MAX_SEED) if body.seed is None else body.seed
        limit = min(max_tokens, model.max_new_tokens(prompt))
        for k in range(n):
            index = number * n + k
            own = replace(sampling, seed=(seed + k) % _MAX_SEED, max_tokens=limit)
            sequence = GenerationRequest(f"{request_id}-{index}", tuple(prompt), own, adapter=adapter)
            choices.append(Choice(index, sequence, body.stops))
    return choices


def force_calls(choices: list[Choice], body: ChatRequest) -> list[Choice]:
    """The sequences, which must call a tool if the request asks for it."""
    formats = []
    for function in body.forced_functions:
        prefix, suffix = call_frame(function.name)
        formats.append(ToolCallFormat(prefix, function.arguments_schema, suffix))
    if not formats:
        return choices
    forced = []
    for choice in choices:
        sampling = replace(
            choice.request.sampling, json_schema="", tool_calls=tuple(formats), several_calls=body.may_call_again
        )
        forced.append(replace(choice, request=replace(choice.request, sampling=sampling)))
    return forced


class CompletionWriter:
    """Writes answers as responses of `/v1/completions`."""

    def __init__(self, body: CompletionRequest, prompts: Sequence[list[int]], request_id: str) -> None:
        self._body = body
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._prompt_tokens = sum(map(len, prompts))

    def response(self, answers: Sequence[Answer]) -> Completion:
        """The whole response."""
        choices = [
            CompletionChoice(
                index=index,
                text=answer.text,
                logprobs=self._logprobs(answer.scores),
                finish_reason=answer.finish_reason,
            )
            for index, answer in enumerate(answers)
        ]
        completion = self._completion(choices)
        completion.usage = Usage.of(self._prompt_tokens, sum(answer.num_tokens for answer in answers))
        return completion

    async def chunks(self, parts: AsyncGenerator[AnswerPart, None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, as JSON."""
        num_tokens = 0
        texts = TextBodies(lambda index, text: self._chunk(AnswerPart(index, text, num_tokens=1)))
        async with aclosing(parts):
            async for part in parts:
                num_tokens += part.num_tokens
                if part.scores or part.finish_reason:
                    yield json_of(self._chunk(part))
                elif part.text:
                    yield texts.json(part.choice, part.text)
        if self._body.includes_usage:
            last = self._completion([])
            last.usage = Usage.of(self._prompt_tokens, num_tokens)
            yield json_of(last)

    def _chunk(self, part: AnswerPart) -> Completion:
        choice = CompletionChoice(
            index=part.choice, text=part.text, logprobs=self._logprobs(part.scores), finish_reason=part.finish_reason
        )
        chunk = self._completion([choice])
        if self._body.includes_usage:
            chunk.usage = None
        return chunk

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id, object="text_completion", created=self._created, model=self._body.model, choices=choices
        )

    def _logprobs(self, scores: Sequence[ScoredToken]) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        return CompletionLogprobs(
            tokens=[score.text for score in scores],
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=[dict(score.top) for score in scores],
            text_offset=[score.offset for score in scores],
        )


class ChatWriter:
    """Writes answers as responses of `/v1/chat/completions`."""

    def __init__(self, body: ChatRequest, prompt: Sequence[int], request_id: str) -> None:
        self._body = body
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._prompt_tokens = len(prompt)

    def response(self, answers: Sequence[Answer]) -> ChatCompletion:
        """The whole response."""
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._body.model,
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=Usage.of(self._prompt_tokens, sum(answer.num_tokens for answer in answers)),
        )

    async def chunks(self, parts: AsyncGenerator[AnswerPart, None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, as JSON: the role of each answer, its text and calls, and last its finish reason."""
        parsers = {index: _parser(self._body) for index in range(self._body.n or 1)}
        texts = TextBodies(lambda index, text: self._chunk(index, AnswerMessage(content=text), self._logprobs(())))
        num_tokens = 0
        async with aclosing(parts):
            for index in parsers:
                yield json_of(self._chunk(index, AnswerMessage(role="assistant", content="")))
            async for part in parts:
                num_tokens += part.num_tokens
                parser = parsers[part.choice]
                text, calls = _divide(parser, part.text, is_last=part.finish_reason is not None)
                if part.scores:
                    yield json_of(self._chunk(part.choice, AnswerMessage(content=text), self._logprobs(part.scores)))
                elif text:
                    yield texts.json(part.choice, text)
                for chunk in self._last_chunks(part, parser, calls):
                    yield json_of(chunk)
        if self._body.includes_usage:
            last = self._empty_chunk()
            last.usage = Usage.of(self._prompt_tokens, num_tokens)
            yield json_of(last)

    def _last_chunks(self, part: AnswerPart, parser: ToolCallParser | None, calls: list[ParsedCall]) -> list[ChatChunk]:
        """What follows the text of a part: its calls, and the finish reason of its answer."""
        chunks = []
        first = (parser.num_calls if parser else 0) - len(calls)
        for number, call in enumerate(calls, start=first):
            delta = AnswerMessage(tool_calls=[_tool_call(call, number)])
            chunks.append(self._chunk(part.choice, delta))
        if part.finish_reason is not None:
            called = parser is not None and parser.num_calls > 0
            reason: ChatFinishReason = "tool_calls" if called and part.finish_reason == "stop" else part.finish_reason
            chunks.append(self._chunk(part.choice, AnswerMessage(), finish_reason=reason))
        return chunks

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        text, calls = _divide(_parser(self._body), answer.text, is_last=True)
        message = AnswerMessage(role="assistant", content=(text.strip() or None) if calls else text)
        if calls:
            message.tool_calls = [_tool_call(call) for call in calls]
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(answer.scores),
            finish_reason="tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason,
        )

    def _chunk(
        self,
        index: int,
        delta: AnswerMessage,
        logprobs: ChatLogprobs | None = None,
        finish_reason: ChatFinishReason | None = None,
    ) -> ChatChunk:
        chunk = self._empty_chunk()
        chunk.choices = [ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)]
        if self._body.includes_usage:
            chunk.usage = None
        return chunk

    def _empty_chunk(self) -> ChatChunk:
        return ChatChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._body.model, choices=[]
        )

    def _logprobs(self, scores: Sequence[ScoredToken]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        content = [
            TokenLogprobs(
                token=score.text,
                logprob=score.logprob,
                bytes=_bytes_of(score.text),
                top_logprobs=[
                    TopLogprob(token=text, logprob=logprob, bytes=_bytes_of(text)) for text, logprob in score.top
                ],
            )
            for score in scores
        ]
        return ChatLogprobs(content=content)


def _parser(body: ChatRequest) -> ToolCallParser | None:
    return ToolCallParser() if body.usable_tools else None


def _divide(parser: ToolCallParser | None, text: str, *, is_last: bool) -> tuple[str, list[ParsedCall]]:
    """New text without its tool calls, and the calls."""
    if parser is None:
        return text, []
    content, calls = parser.push(text)
    if is_last:
        more, last_calls = parser.flush()
        return content + more, calls + last_calls
    return content, calls


def _tool_call(call: ParsedCall, index: int | None = None) -> ToolCall:
    function = FunctionCall(name=call.name, arguments=call.arguments)
    tool_call = ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=function)
    if index is not None:
        tool_call.index = index
    return tool_call


def _bytes_of(text: str) -> list[int] | None:
    return None if _INCOMPLETE in text else list(text.encode("utf-8"))
