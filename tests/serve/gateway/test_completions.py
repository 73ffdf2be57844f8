"""`/v1/completions`: prompts, answers, streams, sampling and errors."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_serve.engine.base import GenerationRequest
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from tests.serve.support.gateway_client import GatewayClient, tokens_of
from tests.serve.support.scripted_backend import ScriptedBackend

PATH = "/v1/completions"
ANSWER = "SELECT count(*) FROM singer: é€😀 done"


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def json_schema(schema: Any) -> dict[str, Any]:
    """The field of a request for an answer of a JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def test_a_completion_has_openais_form(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, ANSWER)
    body = client.ask(PATH, model="tiny", prompt="how many", max_tokens=99)
    prompt = chat_model.tokenizer("how many")["input_ids"][:-1]
    count = len(tokens_of(chat_model, ANSWER)) + 1
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
        },
    }
    assert client.backend.requests[0].prompt == tuple(prompt)


def test_sampling_defaults_are_openais_and_each_request_has_a_seed(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, ANSWER)
    for _ in range(2):
        assert client.ask(PATH, model="tiny", prompt="x")["choices"][0]["finish_reason"] == "length"
    first, second = (request.sampling for request in client.backend.requests)
    assert (first.temperature, first.top_p, first.max_tokens, first.logprobs) == (1.0, 1.0, 16, None)
    assert first.seed != second.seed


def test_sampling_fields_reach_the_engine(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, ANSWER)
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1.5}
    client.ask(
        PATH, model="polite", prompt=[5, 6], seed=-1, frequency_penalty=-1, logit_bias={"9": -100},
        ignore_eos=True, stop_token_ids=[12], max_tokens=500, unknown_field=1, **fields,
    )  # fmt: skip
    request = client.backend.requests[0]
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.frequency_penalty, sampling.logit_bias, sampling.stop_token_ids) == (-1.0, {9: -100.0}, (12,))
    assert sampling.ignore_eos
    assert sampling.seed == 2**63 - 1
    assert sampling.max_tokens == 254  # of 256, less the prompt
    assert (request.prompt, request.adapter) == ((5, 6), "polite")


@pytest.mark.parametrize(("prompt", "count"), [("a", 1), (["a", "b"], 2), ([5, 6], 1), ([[5], [6, 7], [8]], 3)])
def test_prompts_are_texts_or_token_ids(chat_model: ServedModel, prompt: Any, count: int) -> None:
    client = GatewayClient(chat_model, "ok")
    choices = client.ask(PATH, model="tiny", prompt=prompt, n=2)["choices"]
    assert [choice["index"] for choice in choices] == list(range(2 * count))
    assert {choice["text"] for choice in choices} == {"ok"}
    if not isinstance(prompt, str) and isinstance(prompt[0], list):
        assert [request.prompt for request in client.backend.requests[::2]] == [tuple(ids) for ids in prompt]


def test_answers_of_one_prompt_have_successive_seeds(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, seed_backend(chat_model))
    body = client.ask(PATH, model="tiny", prompt="a", n=3, seed=40)
    assert [choice["text"] for choice in body["choices"]] == ["seed 40", "seed 41", "seed 42"]
    events = client.stream(PATH, model="tiny", prompt="a", n=3, seed=40)
    assert [text_of(events, index) for index in range(3)] == ["seed 40", "seed 41", "seed 42"]


def seed_backend(model: ServedModel) -> ScriptedBackend:
    """Answers with the seed of the request."""

    def script(request: GenerationRequest) -> list[int]:
        return tokens_of(model, f"seed {request.sampling.seed}")

    return ScriptedBackend(script)


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_a_stream_has_the_same_text_and_one_finish_reason(chat_model: ServedModel, chunk_size: int) -> None:
    client = GatewayClient(chat_model, ScriptedBackend(tokens_of(chat_model, ANSWER), chunk_size=chunk_size))
    events = client.stream(PATH, model="tiny", prompt="x", max_tokens=99)
    assert text_of(events) == ANSWER
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert len({event["id"] for event in events}) == 1
    assert all("\ufffd" not in event["choices"][0]["text"] and "usage" not in event for event in events)


def test_a_stream_closes_with_its_usage_on_request(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "one two")
    events = client.stream(PATH, model="tiny", prompt=["a", "b"], n=2, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    whole = client.ask(PATH, model="tiny", prompt=["a", "b"], n=2)
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 50])
@pytest.mark.parametrize("stop", [" FROM", [": é", "zzz"], ["€😀", "(*"], "SELECT"])
def test_stop_strings_cut_the_answer_whatever_the_chunks(chat_model: ServedModel, stop: Any, chunk_size: int) -> None:
    client = GatewayClient(chat_model, ScriptedBackend(tokens_of(chat_model, ANSWER), chunk_size=chunk_size))
    expected = min((ANSWER.split(s)[0] for s in ([stop] if isinstance(stop, str) else stop)), key=len)
    body = client.ask(PATH, model="tiny", prompt="x", stop=stop, max_tokens=99)
    assert body["choices"][0]["text"] == expected
    assert body["choices"][0]["finish_reason"] == "stop"
    events = client.stream(PATH, model="tiny", prompt="x", stop=stop, max_tokens=99)
    assert text_of(events) == expected
    if chunk_size == 1:
        assert client.backend.closed == 2  # the engine does not go on after a stop string


@pytest.mark.parametrize("lost_after", range(12))
def test_a_lost_replica_leaves_no_trace_in_the_text(chat_model: ServedModel, lost_after: int) -> None:
    tokens = tokens_of(chat_model, ANSWER)
    undisturbed = GatewayClient(chat_model, ANSWER).stream(PATH, model="tiny", prompt="x", max_tokens=99)
    client = GatewayClient(
        chat_model, ScriptedBackend(tokens, losses=[lost_after, 2]), GatewaySettings(retry_seconds=0)
    )
    events = client.stream(PATH, model="tiny", prompt="x", max_tokens=99)
    assert text_of(events) == text_of(undisturbed) == ANSWER
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert client.metric("spotune:stream_resumptions_total") == 2
    assert client.metric("vllm:generation_tokens_total") == len(tokens) + 1


@pytest.mark.parametrize("fault", [{"dropped": 1}, {"repeated": 1}])
def test_a_faulty_continuation_changes_the_text(chat_model: ServedModel, fault: dict[str, int]) -> None:
    """Control for the test above."""
    backend = ScriptedBackend(tokens_of(chat_model, ANSWER), losses=[5], **fault)
    client = GatewayClient(chat_model, backend, GatewaySettings(retry_seconds=0))
    assert client.ask(PATH, model="tiny", prompt="x", max_tokens=99)["choices"][0]["text"] != ANSWER


def test_log_probabilities(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "count FROM")
    body = client.ask(PATH, model="tiny", prompt="x", logprobs=2)
    logprobs = body["choices"][0]["logprobs"]
    tokens = [str(chat_model.tokenizer.decode([token])) for token in [*tokens_of(chat_model, "count FROM"), 1]]
    assert logprobs["tokens"] == tokens
    assert logprobs["token_logprobs"] == [-0.5] * len(tokens)
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    offsets = [len("".join(tokens[:number])) for number in range(len(tokens))]
    assert logprobs["text_offset"] == offsets
    events = client.stream(PATH, model="tiny", prompt="x", logprobs=2)
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [token for part in streamed for token in part["tokens"]] == tokens
    assert [offset for part in streamed for offset in part["text_offset"]] == offsets


def test_encoder_decoder_models_complete_texts(sql_model: ServedModel) -> None:
    client = GatewayClient(sql_model, ANSWER)
    assert client.ask(PATH, model="tiny", prompt="how many", max_tokens=99)["choices"][0]["text"] == ANSWER
    assert client.backend.requests[0].prompt == tuple(sql_model.tokenizer("how many")["input_ids"])  # with </s>


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs the field json_schema"),
        (json_schema({"type": "thing"}), "response_format", "Invalid type: thing"),
        (json_schema({"type": "array", "uniqueItems": True}), "response_format", "uniqueItems"),
        (json_schema({"enum": ["x" * 99_999]}), "response_format", "larger than 65536 bytes"),
        (json_schema("a"), "response_format.json_schema.schema", "dictionary"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
        ({"stop": 5}, "stop", "valid string; or: Input should be a valid list"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 128, "prompt": ["a", "b"]}, "n", "at most 128"),
        ({"max_tokens": "9"}, "max_tokens", "valid integer"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "no token 99999"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [5, 99999]}, "prompt", "no token 99999"),
        ({"prompt": None}, "prompt", "valid string"),
        ({"prompt": [["a"]]}, "prompt.0.0", "valid integer"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "valid boolean"),
    ],
)
def test_wrong_fields_are_named(chat_model: ServedModel, fields: dict[str, Any], param: str, message: str) -> None:
    client = GatewayClient(chat_model, ANSWER)
    status, error = client.refuse(PATH, {"model": "tiny", "prompt": "x", **fields})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]
    assert client.backend.requests == []


def test_null_fields_are_defaults(chat_model: ServedModel) -> None:
    fields = ["stop", "temperature", "n", "seed", "logit_bias", "logprobs", "echo", "response_format", "stream_options"]
    body = dict.fromkeys(fields)
    assert GatewayClient(chat_model, "ok").ask(PATH, model="tiny", prompt="x", **body)["choices"][0]["text"] == "ok"


def test_a_missing_field_is_named(chat_model: ServedModel) -> None:
    status, error = GatewayClient(chat_model, ANSWER).refuse(PATH, {"model": "tiny"})
    assert (status, error["param"], error["code"]) == (400, "prompt", "missing_required_parameter")


@pytest.mark.parametrize("length", [256, 300])
def test_a_long_prompt_is_refused_with_both_numbers(chat_model: ServedModel, length: int) -> None:
    status, error = GatewayClient(chat_model, ANSWER).refuse(PATH, {"model": "tiny", "prompt": [5] * length})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert f"{length} tokens" in error["message"]
    assert "255" in error["message"]


def test_an_encoders_input_has_the_length_of_training(sql_model: ServedModel) -> None:
    status, error = GatewayClient(sql_model, ANSWER).refuse(PATH, {"model": "tiny", "prompt": [5] * 65})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "64" in error["message"]


def test_an_unknown_model_or_adapter_is_named(chat_model: ServedModel) -> None:
    status, error = GatewayClient(chat_model, ANSWER).refuse(PATH, {"model": "rude", "prompt": "x"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "tiny, polite" in error["message"]
