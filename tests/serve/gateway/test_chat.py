"""`/v1/chat/completions`: chat templates, job templates, tools and streams."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spotune_serve.gateway.served_model import ServedModel
from tests.serve.support.gateway_client import GatewayClient
from tests.serve.support.served_models import load_model

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "how many"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def prompt_text(client: GatewayClient, model: ServedModel) -> str:
    return str(model.tokenizer.decode(list(client.backend.requests[-1].prompt)))


def test_a_chat_completion_has_openais_form(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "Seven.")
    body = client.ask(PATH, model="tiny", messages=HELLO)
    assert body.pop("id").startswith("chatcmpl-")
    body.pop("created")
    usage = body.pop("usage")
    message = {"role": "assistant", "content": "Seven."}
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
    }
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert prompt_text(client, chat_model) == "user:how many;assistant:"
    limit = 256 - len(client.backend.requests[0].prompt)
    assert client.backend.requests[0].sampling.max_tokens == limit


def test_max_completion_tokens_is_the_newer_name(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "Seven.")
    client.ask(PATH, model="tiny", messages=HELLO, max_tokens=9, max_completion_tokens=3)
    assert client.backend.requests[0].sampling.max_tokens == 3


def test_content_parts_are_joined(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "Seven.")
    parts = [{"type": "text", "text": "how"}, {"type": "text", "text": "many"}]
    client.ask(PATH, model="tiny", messages=[{"role": "user", "content": parts}])
    assert prompt_text(client, chat_model) == "user:how\nmany;assistant:"


def test_content_parts_are_left_to_a_template_that_reads_them(chat_model: ServedModel) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
    )
    tokenizer = copy.deepcopy(chat_model.tokenizer)
    tokenizer.chat_template = template
    parts = [{"type": "text", "text": "how"}, {"type": "text", "text": "many"}]
    model = dataclasses.replace(chat_model, tokenizer=tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "assistant", "content": "seven"}]
    assert model.render_chat(messages) == "user:[how][many];assistant:seven;"


def test_a_stream_starts_with_the_role_and_closes_with_the_reason(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "Seven singers.")
    events = client.stream(PATH, model="tiny", messages=HELLO, n=2, stream_options={"include_usage": True})
    for index in range(2):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Seven singers."
        assert choices[-1] == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[-1]["usage"]["completion_tokens"] > 0


def test_log_probabilities(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "é!")
    body = client.ask(PATH, model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    assert {token["logprob"] for token in content} == {-0.5}
    assert [token["bytes"] for token in content if token["token"] == "!"] == [[33]]
    assert [token["bytes"] for token in content if "\ufffd" in token["token"]] == [None, None]  # halves of é
    events = client.stream(PATH, model="tiny", messages=HELLO, logprobs=True)
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [token["token"] for part in streamed if part for token in part["content"]] == [t["token"] for t in content]


@pytest.mark.parametrize(
    ("choice", "tools"), [("auto", "tools:weather auto|"), ("none", ""), (None, "tools:weather None|")]
)
def test_tools_reach_the_chat_template(chat_model: ServedModel, choice: str | None, tools: str) -> None:
    client = GatewayClient(chat_model, "ok")
    client.ask(PATH, model="tiny", messages=HELLO, tools=TOOLS, tool_choice=choice)
    assert prompt_text(client, chat_model) == f"{tools}user:how many;assistant:"


def test_tool_calls_are_parsed(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, f"{CALL}\n{CALL}")
    choice = client.ask(PATH, model="tiny", messages=HELLO, tools=TOOLS, max_tokens=200)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["id"] != second["id"]
    assert first["function"]["name"] == "weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Köln"}


def test_tool_calls_are_streamed_whole(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, f"Wait. {CALL}")
    events = client.stream(PATH, model="tiny", messages=HELLO, tools=TOOLS, max_tokens=200)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait. "
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (calls[0]["index"], calls[0]["function"]["name"]) == (0, "weather")
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_calls_stay_text_without_tools(chat_model: ServedModel) -> None:
    message = GatewayClient(chat_model, CALL).ask(PATH, model="tiny", messages=HELLO)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALL}


def test_arguments_of_earlier_calls_reach_the_template_as_objects(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "ok")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
    ]
    client.ask(PATH, model="tiny", messages=messages, max_tokens=5)
    assert prompt_text(client, chat_model) == "user:how many;assistant:[Rome];tool:sun;assistant:"


@pytest.mark.parametrize("task", ["causal", "seq2seq"])
def test_a_template_of_one_column_answers_the_last_question(tmp_path: Path, task: str) -> None:
    model = load_model(tmp_path, task, prompt="translate: {text}")
    client = GatewayClient(model, "ok")
    messages = [{"role": "system", "content": "s"}, *HELLO, {"role": "assistant", "content": "a"}]
    client.ask(PATH, model="tiny", messages=[*messages, {"role": "user", "content": "there"}])
    suffix = "</s>" if task == "seq2seq" else ""
    assert prompt_text(client, model) == f"translate: there{suffix}"
    status, error = client.refuse(PATH, {"model": "tiny", "messages": [{"role": "system", "content": "s"}]})
    assert (status, error["param"]) == (400, "messages")


def test_an_encoder_decoder_model_with_messages_chats(tmp_path: Path) -> None:
    model = load_model(tmp_path, "seq2seq", messages="messages", chat=True)
    client = GatewayClient(model, "ok")
    client.ask(PATH, model="tiny", messages=HELLO)
    assert prompt_text(client, model) == "user:how many;assistant:</s>"
    assert client.backend.requests[0].sampling.max_tokens == 32


def test_a_template_of_several_columns_does_not_chat(sql_model: ServedModel) -> None:
    status, error = GatewayClient(sql_model, "ok").refuse(PATH, {"model": "tiny", "messages": HELLO})
    assert (status, error["param"]) == (400, "messages")
    assert "question and columns" in error["message"]
    assert "/v1/predict" in error["message"]


def test_a_model_without_templates_does_not_chat(tmp_path: Path) -> None:
    status, error = GatewayClient(load_model(tmp_path), "ok").refuse(PATH, {"model": "tiny", "messages": HELLO})
    assert status == 400
    assert "no chat template" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"messages": [{"role": "user", "content": "there " * 999}]}, "messages"),
    ],
)
def test_wrong_fields_are_named(chat_model: ServedModel, fields: dict[str, Any], param: str) -> None:
    status, error = GatewayClient(chat_model, "ok").refuse(PATH, {"model": "tiny", "messages": HELLO, **fields})
    assert (status, error["param"]) == (400, param)
