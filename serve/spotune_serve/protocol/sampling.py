"""The fields that completions and chat completions share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from spotune_serve.protocol.response_format import ResponseFormat

MAX_LOGPROBS = 20
_MAX_STOPS = 4
_MAX_BIAS = 100.0
_MAX_TOKEN_DIGITS = 10

Token = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """Options of a stream.

    Attributes:
        include_usage: the last event before `[DONE]` has the number of tokens.
    """

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class SamplingFields(BaseModel):
    """How answers are drawn. Every field may be null, which is the default; unknown fields are ignored.

    `top_k`, `min_p`, `ignore_eos` and `stop_token_ids` are vLLM's; the others are OpenAI's.
    """

    model_config = ConfigDict(strict=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-_MAX_BIAS, le=_MAX_BIAS)]] | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Token] | None = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > _MAX_STOPS:
            raise ValueError(f"at most {_MAX_STOPS} stop strings are possible")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or {}:
            if not token.isdecimal() or len(token) > _MAX_TOKEN_DIGITS:
                raise ValueError(f"the keys are token ids, which {token!r:.50} is not")
        return bias

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; empty ones are left out."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def answer_schema(self) -> str:
        """The JSON schema of an answer's text; empty if it may be any text."""
        return self.response_format.schema_text if self.response_format else ""

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream closes with the number of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)
