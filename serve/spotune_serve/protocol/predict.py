"""Bodies of `/v1/predict`, which fills the prompt template of the job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PredictRequest(BaseModel):
    """Rows to answer, or one row. Answers are greedy, as those of `spotune predict`, unless a temperature is given."""

    model_config = ConfigDict(strict=True)

    rows: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    row: dict[str, Any] | None = None
    model: str | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    seed: int | None = None
    stream: bool | None = None

    @model_validator(mode="after")
    def _check_rows(self) -> PredictRequest:
        if (self.rows is None) == (self.row is None):
            raise ValueError("give either 'rows', a list of objects, or 'row', one object")
        return self

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        """The rows, in order."""
        return self.rows if self.rows is not None else [self.row or {}]


class Prediction(BaseModel):
    """The answer to a row."""

    prompt: str
    answer: str
    finish_reason: Literal["stop", "length"]


class PredictResponse(BaseModel):
    """The answers, in the order of the rows."""

    model: str
    predictions: list[Prediction]


class PredictEvent(BaseModel):
    """A part of an answer. The first event of a row has the prompt, the last one the finish reason."""

    index: int
    text: str
    prompt: str | None = None
    finish_reason: Literal["stop", "length"] | None = None
    tokens: int


class ModelInfo(BaseModel):
    """What a page or a client needs to know of the model.

    Attributes:
        model: its id.
        adapters: ids of its LoRA adapters.
        task: `causal` or `seq2seq`.
        prompt: the prompt template; empty if it has none.
        fields: the fields of a row.
        messages: the field with chat messages; empty if it has none.
        chat: whether `/v1/chat/completions` has answers.
        max_new_tokens: default maximum length of an answer, in tokens.
        max_prompt_tokens: maximum length of a prompt, in tokens.
    """

    model: str
    adapters: list[str]
    task: str
    prompt: str
    fields: list[str]
    messages: str
    chat: bool
    max_new_tokens: int
    max_prompt_tokens: int
