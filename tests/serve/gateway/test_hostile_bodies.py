"""Bodies that the gateway answered with status 500, found by fuzzing."""

from __future__ import annotations

import json

import pytest

from spotune_serve.gateway.served_model import ServedModel
from tests.serve.support.gateway_client import GatewayClient

HALF = "\ud800"


def chat(arguments: str) -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "model": "tiny",
        "messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}],
    }


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a":' * 5000], ids=["lists", "objects"])
def test_deeply_nested_arguments_are_an_error_of_the_client(chat_model: ServedModel, arguments: str) -> None:
    response = GatewayClient(chat_model, "ok").post("/v1/chat/completions", json=chat(arguments))
    assert response.status_code < 500


def test_half_a_character_is_an_error_of_the_client(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "ok")
    status, error = client.refuse("/v1/chat/completions", chat('{"city": "\\ud800"}'))
    assert (status, "half a character" in error["message"]) == (400, True)
    body = json.dumps({"row": {"messages": [{"role": "user", "content": HALF}]}})
    response = client.post("/v1/predict", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, "half a character" in response.text) == (400, True)
