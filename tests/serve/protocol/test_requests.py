"""Request bodies: what is accepted, and what the values mean."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_serve.protocol.chat import ChatMessage, ChatRequest
from spotune_serve.protocol.completions import CompletionRequest
from spotune_serve.protocol.predict import PredictRequest

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt: Any, prompts: Any) -> None:
    assert CompletionRequest(model="m", prompt=prompt).prompts == prompts


@pytest.mark.parametrize(("stop", "stops"), [(None, ()), ("a", ("a",)), ("", ()), (["a", "", "b"], ("a", "b"))])
def test_stop_strings(stop: Any, stops: tuple[str, ...]) -> None:
    assert CompletionRequest(model="m", prompt="x", stop=stop).stops == stops


@pytest.mark.parametrize(
    ("fields", "count"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_chat_log_probabilities(fields: dict[str, Any], count: int | None) -> None:
    assert ChatRequest.model_validate({"model": "m", "messages": MESSAGES, **fields}).num_logprobs == count


def test_messages_keep_fields_for_the_chat_template() -> None:
    message = ChatMessage.model_validate({"role": "tool", "content": None, "tool_call_id": "c", "name": "f"})
    assert message.as_template_value() == {"role": "tool", "content": "", "tool_call_id": "c", "name": "f"}


@pytest.mark.parametrize("arguments", ["not json", {"a": 1}])
def test_arguments_that_are_no_json_text_are_passed_on(arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.as_template_value()["tool_calls"] == [call]


def test_one_row_is_a_list_of_one() -> None:
    assert PredictRequest(row={"a": 1}).all_rows == PredictRequest(rows=[{"a": 1}]).all_rows == [{"a": 1}]
