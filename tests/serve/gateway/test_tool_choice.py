"""`tool_choice` that asks for a call: every answer is a valid one, whatever the model would say and what is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from spotune_serve.engine.base import UnsupportedToolChoiceError
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from tests.serve.support.engine_backend import EngineBackend
from tests.serve.support.gateway_client import GatewayClient

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "how many"}]


class Weather(BaseModel):
    """Arguments of a tool."""

    model_config = ConfigDict(extra="forbid", strict=True)

    city: str = Field(max_length=6)
    days: int = Field(ge=1, le=9)


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("weather", parameters=Weather.model_json_schema()), tool("now")]
BODY: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "temperature": 2.0, "max_tokens": 200}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def engine_client(model: ServedModel, lost_after: int = 0) -> GatewayClient:
    return GatewayClient(model, EngineBackend(model, lost_after), GatewaySettings(retry_seconds=0))


def test_a_named_function_is_called_once_with_valid_arguments(chat_model: ServedModel) -> None:
    client = engine_client(chat_model)
    choices = client.ask(PATH, **BODY, tool_choice=named("weather"), n=5, seed=3)["choices"]
    found = []
    for choice in choices:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        found.append(Weather.model_validate_json(call["function"]["arguments"]))
    assert len({str(each) for each in found}) > 1
    (choice,) = client.ask(PATH, **BODY, tool_choice=named("now"))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}


def test_a_required_call_is_one_of_the_tools(chat_model: ServedModel) -> None:
    stop = {str(token): 90 for token in chat_model.eos_token_ids}  # random weights would go on
    answer = engine_client(chat_model).ask(PATH, **BODY, tool_choice="required", logit_bias=stop, seed=1)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} <= {"weather", "now"}


def test_a_streamed_call_survives_the_loss_of_its_replica(chat_model: ServedModel) -> None:
    body = {**BODY, "tool_choice": named("weather"), "seed": 5}
    (whole,) = engine_client(chat_model).ask(PATH, **body)["choices"]
    lossy = engine_client(chat_model, lost_after=3)
    deltas = [event["choices"][0]["delta"] for event in lossy.stream(PATH, **body)]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == whole["message"]["tool_calls"][0]["function"]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""


def test_a_call_takes_the_place_of_the_response_format(chat_model: ServedModel) -> None:
    body = {**BODY, "tool_choice": named("now"), "response_format": {"type": "json_object"}}
    (choice,) = engine_client(chat_model).ask(PATH, **body)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_other_choices_leave_the_answer_to_the_model(chat_model: ServedModel, choice: str | None) -> None:
    client = GatewayClient(chat_model, "Seven.")
    assert client.ask(PATH, **BODY, tool_choice=choice)["choices"][0]["message"]["content"] == "Seven."
    assert not client.backend.requests[0].sampling.has_grammar


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": None, "tool_choice": "required"}, "tools has: none"),
        ({"tool_choice": named("clock")}, "names the function 'clock', and tools has: weather, now"),
        ({"tool_choice": {"type": "allowed_tools"}}, "must be none, auto, required"),
        ({"tool_choice": {"type": "function", "function": "now"}}, "must be none, auto, required"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools[0] must have a function with a name"),
        ({"tools": [tool("a", parameters={"type": "array"})], "tool_choice": "required"}, "'a' must have the type"),
        (
            {"tools": [tool("a", parameters={"properties": {"x": {"type": "array", "uniqueItems": True}}})],
             "tool_choice": named("a")},
            "parameters of 'a': the JSON schema cannot be enforced: Unimplemented keys: [\"uniqueItems\"]",
        ),
        (
            {"tools": [tool(f"f{k}", parameters={"description": "x" * 40_000}) for k in range(2)],
             "tool_choice": "required"},
            "larger than 65536 bytes: name one function",
        ),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_enforced_is_refused(
    chat_model: ServedModel, fields: dict[str, Any], message: str
) -> None:
    status, error = GatewayClient(chat_model, "ok").refuse(PATH, {**BODY, **fields})
    assert (status, error["param"]) == (400, "tool_choice")
    assert message in error["message"]


def test_an_engine_that_cannot_enforce_calls_is_named(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "ok")
    client.backend.error = UnsupportedToolChoiceError("this service runs on vLLM")
    status, error = client.refuse(PATH, {**BODY, "tool_choice": "required"})
    assert (status, error["param"]) == (400, "tool_choice")
    assert error["message"] == "tool_choice: this service runs on vLLM"
