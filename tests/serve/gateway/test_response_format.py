"""`response_format` over HTTP, answered by a real engine with random weights that loses its replica now and then."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from tests.serve.support.engine_backend import EngineBackend
from tests.serve.support.gateway_client import GatewayClient

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "how many"}]


class Singer(BaseModel):
    """What the answers are."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    alive: bool


FORMAT = {"type": "json_schema", "json_schema": {"name": "singer", "schema": Singer.model_json_schema()}}


def client_of(model: ServedModel, backend: Any) -> GatewayClient:
    return GatewayClient(model, backend, GatewaySettings(retry_seconds=0))


def streamed_text(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_streamed_answers_match_the_schema_whatever_is_lost(chat_model: ServedModel, temperature: float) -> None:
    body = {"model": "tiny", "messages": HELLO, "seed": 5, "temperature": temperature, "response_format": FORMAT}
    lossy, undisturbed = EngineBackend(chat_model, lost_after=2), EngineBackend(chat_model)
    whole = client_of(chat_model, undisturbed).ask(CHAT, **body)["choices"][0]
    events = client_of(chat_model, lossy).stream(CHAT, **body)
    Singer.model_validate_json(whole["message"]["content"])
    assert streamed_text(events) == whole["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    assert lossy.losses > 2


def test_each_answer_of_a_request_matches_the_schema(chat_model: ServedModel) -> None:
    client = client_of(chat_model, EngineBackend(chat_model))
    answers = client.ask(
        "/v1/completions", model="tiny", prompt="x", n=4, seed=5, max_tokens=250, response_format=FORMAT
    )
    texts = [choice["text"] for choice in answers["choices"]]
    for text in texts:
        Singer.model_validate_json(text)
    assert len(set(texts)) > 1


def test_json_object_is_any_object(chat_model: ServedModel) -> None:
    client = client_of(chat_model, EngineBackend(chat_model))
    bias = {str(chat_model.tokenizer.convert_tokens_to_ids("}")): 90}  # random weights would go on
    body = {"model": "tiny", "messages": HELLO, "logit_bias": bias, "response_format": {"type": "json_object"}}
    assert json.loads(client.ask(CHAT, **body)["choices"][0]["message"]["content"]) == {}


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_text_is_not_constrained(chat_model: ServedModel, value: Any) -> None:
    client = GatewayClient(chat_model, "Seven.")
    assert client.ask(CHAT, model="tiny", messages=HELLO, response_format=value)["choices"][0]["message"]["content"]
    assert client.backend.requests[0].sampling.json_schema == ""
