"""`response_format`: whether an answer is any text, any JSON object, or JSON of a given schema."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_SCHEMA_BYTES = 64 * 1024
"""A schema is compiled before the first token; the time grows with its size."""
_ANY_OBJECT = '{"type": "object"}'


class JsonSchema(BaseModel):
    """A schema with its name. Every schema is enforced, whatever `strict` says."""

    model_config = ConfigDict(strict=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The format of an answer."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs the field json_schema with a schema")
        if self.type != "text":
            check_schema(self.schema_text)
        return self

    @property
    def schema_text(self) -> str:
        """The JSON schema of the answer's text; empty if it may be any text."""
        if self.type == "json_object":
            return _ANY_OBJECT
        return json.dumps(self.json_schema.schema_) if self.type == "json_schema" and self.json_schema else ""


def check_schema(text: str) -> None:
    """Refuse a JSON schema that cannot be enforced.

    Raises:
        ValueError: it is not valid, uses a keyword that llguidance does not have, or is too large; or llguidance is
            not installed.
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ValueError("JSON answers need the package llguidance on the server: install spotune[serve]") from error
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise ValueError(f"the JSON schema is larger than {MAX_SCHEMA_BYTES} bytes")
    failed, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(text))
    if failed:
        raise ValueError(f"the JSON schema cannot be enforced: {messages[0]}")
