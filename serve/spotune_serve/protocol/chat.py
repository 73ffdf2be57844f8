"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from spotune.prompting.content import simple_content
from spotune_serve.protocol.sampling import MAX_LOGPROBS, SamplingFields
from spotune_serve.protocol.tool_choice import ToolFunction, check_functions, forced_functions
from spotune_serve.protocol.usage import Usage

_INSTEAD = {"functions": "use tools", "function_call": "use tool_choice"}
_NEUTRAL = ("none", ["text"])
"""Values of refused fields that ask for nothing."""


class TextPart(BaseModel):
    """A part of a message's content. Images and sound have other types, which text models cannot read."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message. Other fields, such as `name` or `tool_call_id`, are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def as_template_value(self) -> dict[str, Any]:
        """The message as chat templates expect it: arguments of tool calls are objects, one text part is text."""
        value = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            value["content"] = simple_content(value["content"]) or ""
        elif self.content is None:
            value["content"] = ""
        if self.tool_calls is None:
            value.pop("tool_calls", None)
        else:
            value["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls]
        return value


class ChatRequest(SamplingFields):
    """Continue a chat with an answer of the assistant."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None

    @field_validator("functions", "function_call", "audio", "modalities", "web_search_options")
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and value not in _NEUTRAL:
            instead = _INSTEAD.get(info.field_name or "", "models of this service read and write text only")
            raise ValueError(f"{info.field_name} is not supported: {instead}")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, tool_choice: Any, info: ValidationInfo) -> Any:
        check_functions(forced_functions(info.data.get("tools") or [], tool_choice))
        return tool_choice

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs is not None and not info.data.get("logprobs"):
            raise ValueError("top_logprobs needs logprobs: true")
        return top_logprobs

    @property
    def answer_limit(self) -> int | None:
        """Maximum tokens of an answer; None: as many as the model takes."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens to return with each token; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_functions(self) -> list[ToolFunction]:
        """The functions of which each answer must call one; empty if it may be a text."""
        return forced_functions(self.tools or [], self.tool_choice)

    @property
    def may_call_again(self) -> bool:
        """Whether an answer with a forced call may have more of them: not if `tool_choice` names a function."""
        return self.tool_choice == "required"


class FunctionCall(BaseModel):
    """A function's name and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool. `index` is used in streams only."""

    index: int | None = None
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(BaseModel):
    """The assistant's message, or a part of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class TopLogprob(BaseModel):
    """A token and its natural log probability. `bytes` is null for tokens that are not whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TopLogprob):
    """A token of the answer with the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of an answer's tokens."""

    content: list[TokenLogprobs]


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatChunkChoice(BaseModel):
    """A part of an answer."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletion(BaseModel):
    """The answer to a `ChatRequest`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(BaseModel):
    """An event of the stream of a `ChatRequest`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI writes them as JSON, and chat templates write JSON again."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
