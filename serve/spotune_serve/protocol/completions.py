"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from spotune_serve.protocol.sampling import MAX_LOGPROBS, SamplingFields, Token
from spotune_serve.protocol.usage import Usage

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    """Continue one or several prompts."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(
        cls, prompt: str | list[str] | list[int] | list[list[int]]
    ) -> str | list[str] | list[int] | list[list[int]]:
        if not prompt:
            raise ValueError("the prompt is empty")
        return prompt

    @field_validator("echo")
    @classmethod
    def _check_echo(cls, echo: bool | None) -> bool | None:
        if echo:
            raise ValueError("echo is not supported: put the prompt in front of the answer")
        return echo

    @field_validator("suffix")
    @classmethod
    def _check_suffix(cls, suffix: str | None) -> str | None:
        if suffix:
            raise ValueError("suffix is not supported: models continue the prompt only")
        return suffix

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, best_of: int | None) -> int | None:
        if best_of not in {None, 1}:
            raise ValueError("best_of is not supported: ask for n answers with log probabilities, and choose")
        return best_of

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [item for item in self.prompt if isinstance(item, int)]
        if tokens:
            return [tokens]
        texts = [item for item in self.prompt if isinstance(item, str)]
        return texts or [item for item in self.prompt if isinstance(item, list)]


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion's tokens.

    Attributes:
        tokens: their texts.
        token_logprobs: their natural log probabilities.
        top_logprobs: the most likely tokens and their log probabilities, at each position.
        text_offset: where each token starts in the completion's text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """An answer, or a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    """The answer to a `CompletionRequest`, or an event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
