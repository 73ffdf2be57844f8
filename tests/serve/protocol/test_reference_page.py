"""The reference of the HTTP API lists exactly the fields that requests have, and says what happens to each."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from spotune_serve.protocol.chat import ChatRequest
from spotune_serve.protocol.completions import CompletionRequest
from spotune_serve.protocol.predict import PredictRequest
from tests import ROOT

pytest.importorskip("openai")
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_completion_create_params

PAGE = (ROOT / "docs/reference/http-api.md").read_text()
OPENAI: dict[str, set[str]] = {
    "/v1/chat/completions": {"stream", *chat_completion_create_params.CompletionCreateParamsBase.__annotations__},
    "/v1/completions": {"stream", *completion_create_params.CompletionCreateParamsBase.__annotations__},
    "/v1/predict": set(),
}
MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/predict": PredictRequest,
}
REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "m", "prompt": "x"},
}
REFUSED: dict[str, Any] = {
    "functions": [{"name": "f"}], "function_call": "auto", "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"], "web_search_options": {}, "echo": True, "suffix": "x", "best_of": 2,
}  # fmt: skip


def fields_of(path: str) -> dict[str, str]:
    """The fields of a path's table, and their support."""
    section = PAGE.split(f"\n## {path}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (honoured|refused|ignored) \|", section, re.MULTILINE)
    assert len(rows) == section.count("\n| `"), "a row has another support"
    return dict(rows)


@pytest.mark.parametrize("path", MODELS)
def test_page_has_every_field(path: str) -> None:
    fields = fields_of(path)
    known = set(MODELS[path].model_fields)
    assert {field for field, support in fields.items() if support != "ignored"} == known
    assert {field for field, support in fields.items() if support == "ignored"} == OPENAI[path] - known


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, field) for path in REQUIRED for field, support in fields_of(path).items() if support == "refused"],
)
def test_field_that_the_page_calls_refused_is_refused(path: str, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MODELS[path].model_validate({**REQUIRED[path], field: REFUSED[field]})
    assert caught.value.errors()[0]["loc"][0] == field
    MODELS[path].model_validate({**REQUIRED[path], field: None})


@pytest.mark.parametrize("path", REQUIRED)
def test_fields_that_the_page_calls_ignored_are_ignored(path: str) -> None:
    ignored = {field: object() for field, support in fields_of(path).items() if support == "ignored"}
    assert MODELS[path].model_validate(REQUIRED[path] | ignored) == MODELS[path].model_validate(REQUIRED[path])
