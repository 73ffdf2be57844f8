"""`/v1/predict`: rows as the job's prompts, greedy, as `spotune predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotune_serve.gateway.served_model import ServedModel
from tests.serve.support.gateway_client import GatewayClient
from tests.serve.support.served_models import load_model

PATH = "/v1/predict"
ROW = {"question": "how many", "columns": "age"}


def test_rows_are_filled_into_the_jobs_prompt(sql_model: ServedModel) -> None:
    client = GatewayClient(sql_model, "SELECT 1")
    body = client.ask(PATH, rows=[ROW, {**ROW, "columns": 30, "unused": None}])
    prompts = ["question: how many columns: age", "question: how many columns: 30"]
    assert body == {
        "model": "tiny",
        "predictions": [{"prompt": p, "answer": "SELECT 1", "finish_reason": "stop"} for p in prompts],
    }
    encoded = [tuple(ids) for ids in sql_model.tokenizer(prompts)["input_ids"]]
    assert [request.prompt for request in client.backend.requests] == encoded
    assert {(r.sampling.temperature, r.sampling.max_tokens) for r in client.backend.requests} == {(0.0, 32)}


def test_options_reach_the_engine(sql_model: ServedModel) -> None:
    client = GatewayClient(sql_model, "SELECT 1")
    body = client.ask(PATH, row=ROW, model="polite", max_new_tokens=2, temperature=0.5, seed=4)
    assert body["model"] == "polite"
    assert body["predictions"][0]["finish_reason"] == "length"
    request = client.backend.requests[0]
    assert (request.adapter, request.sampling.temperature, request.sampling.seed) == ("polite", 0.5, 4)


def test_a_long_encoder_input_is_truncated_as_in_training(sql_model: ServedModel) -> None:
    client = GatewayClient(sql_model, "SELECT 1")
    client.ask(PATH, row={**ROW, "columns": "age " * 99})
    assert len(client.backend.requests[0].prompt) == 64
    assert client.backend.requests[0].prompt[-1] == 1


def test_a_stream_has_the_prompt_and_the_answer_in_parts(sql_model: ServedModel) -> None:
    client = GatewayClient(sql_model, "SELECT 1")
    events = client.stream(PATH, rows=[ROW, ROW])
    for index in range(2):
        own = [event for event in events if event["index"] == index]
        assert own[0]["prompt"] == "question: how many columns: age"
        assert "".join(event["text"] for event in own) == "SELECT 1"
        assert own[-1]["finish_reason"] == "stop"
        assert not any("finish_reason" in event or "prompt" in event for event in own[1:-1])
    assert sum(event["tokens"] for event in events) == client.metric("vllm:generation_tokens_total")


@pytest.mark.parametrize("value", ["how many", [{"role": "user", "content": "how many"}]])
def test_a_messages_column_takes_a_text_or_messages(chat_model: ServedModel, value: Any) -> None:
    body = GatewayClient(chat_model, "ok").ask(PATH, row={"messages": value})
    assert body["predictions"][0]["prompt"] == "user:how many;assistant:"


def test_a_model_without_a_template_takes_the_prompt(tmp_path: Path) -> None:
    model = load_model(tmp_path)
    assert model.example_request() == {"row": {"prompt": "..."}}
    body = GatewayClient(model, "ok").ask(PATH, row={"prompt": "a {b}"})
    assert body["predictions"][0]["prompt"] == "a {b}"


def test_the_model_is_described(sql_model: ServedModel) -> None:
    assert GatewayClient(sql_model, "ok").get(PATH).json() == {
        "model": "tiny",
        "adapters": ["polite"],
        "task": "seq2seq",
        "prompt": "question: {question} columns: {columns}",
        "fields": ["question", "columns"],
        "messages": "",
        "chat": False,
        "max_new_tokens": 32,
        "max_prompt_tokens": 64,
    }


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, None, "give either 'rows'"),
        ({"row": ROW, "rows": [ROW]}, None, "give either 'rows'"),
        ({"rows": []}, "rows", "at least 1"),
        ({"row": "text"}, "row", "valid dictionary"),
        ({"row": {"question": "x"}}, "row", "no column 'columns'"),
        ({"row": {**ROW, "columns": None}}, "row", "is null"),
        ({"row": ROW, "max_new_tokens": 0}, "max_new_tokens", "greater than"),
    ],
)
def test_wrong_rows_are_refused(sql_model: ServedModel, body: Any, param: str | None, message: str) -> None:
    status, error = GatewayClient(sql_model, "ok").refuse(PATH, body)
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize("row", [{}, {"messages": 3}, {"messages": [{"role": 1}, "x"]}])
def test_wrong_messages_are_refused(chat_model: ServedModel, row: Any) -> None:
    status, error = GatewayClient(chat_model, "ok").refuse(PATH, {"row": row})
    assert status == 400, error
