"""The official `openai` client works with the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from spotune_serve.gateway.routes.app import create_app
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings, hash_key
from tests.serve.support.gateway_client import tokens_of
from tests.serve.support.scripted_backend import ScriptedBackend
from tests.serve.support.versions import single_version

openai: Any = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "how many"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SETTINGS = GatewaySettings(api_keys=(hash_key("secret"),), retry_seconds=0)


def with_client(
    model: ServedModel,
    backend: ScriptedBackend,
    test: Callable[[Any], Awaitable[None]],
    key: str = "secret",
    settings: GatewaySettings = SETTINGS,
) -> None:
    async def run() -> None:
        transport = httpx2.ASGITransport(app=create_app(await single_version(model, backend, settings)))
        async with openai.AsyncOpenAI(
            base_url="http://gateway/v1",
            api_key=key,
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
        ) as client:
            await test(client)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_completions(chat_model: ServedModel) -> None:
    async def test(client: Any) -> None:
        request = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 99, "logprobs": 1}
        whole = await client.completions.create(**request)
        assert [choice.text for choice in whole.choices] == ["SELECT 1", "SELECT 1"]
        assert whole.choices[0].logprobs.token_logprobs[0] == -0.5
        text = ["", ""]
        async for chunk in await client.completions.create(**request, stream=True):
            for choice in chunk.choices:
                text[choice.index] += choice.text
        assert text == ["SELECT 1", "SELECT 1"]

    with_client(chat_model, ScriptedBackend(tokens_of(chat_model, "SELECT 1"), losses=[2, 1, 3]), test)


def test_chat_with_usage(chat_model: ServedModel) -> None:
    async def test(client: Any) -> None:
        request = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 1}
        whole = await client.chat.completions.create(**request)
        assert whole.choices[0].message.content == "Seven."
        assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5
        stream = await client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "Seven."
        assert chunks[-1].usage == whole.usage
        assert chunks[-2].choices[0].finish_reason == "stop"

    with_client(chat_model, ScriptedBackend(tokens_of(chat_model, "Seven.")), test)


def test_the_streaming_helper_collects_tool_calls(chat_model: ServedModel) -> None:
    answer = 'Wait. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'

    async def test(client: Any) -> None:
        async with client.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as stream:
            completion = await stream.get_final_completion()
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Wait. "
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Rome"}'

    with_client(chat_model, ScriptedBackend(tokens_of(chat_model, answer)), test)


def test_parsed_answers_send_their_schema(chat_model: ServedModel) -> None:
    class Singer(BaseModel):
        name: str
        age: int

    backend = ScriptedBackend(tokens_of(chat_model, '{"name": "Ada", "age": 36}'))

    async def test(client: Any) -> None:
        completion = await client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Singer)
        assert completion.choices[0].message.parsed == Singer(name="Ada", age=36)

    with_client(chat_model, backend, test)
    assert json.loads(backend.requests[0].sampling.json_schema)["properties"].keys() == {"name", "age"}


def test_every_field_of_the_client_is_taken(chat_model: ServedModel) -> None:
    fields = {
        "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "logprobs": True, "max_completion_tokens": 99, "n": 2,
        "presence_penalty": 0.5, "response_format": {"type": "text"}, "seed": 1, "stop": ["x"], "temperature": 0.5,
        "tool_choice": "auto", "tools": TOOLS, "top_logprobs": 1, "top_p": 0.5, "metadata": {"a": "b"},
        "modalities": ["text"], "parallel_tool_calls": False, "reasoning_effort": "low", "service_tier": "auto",
        "store": False, "user": "me", "verbosity": "low",
    }  # fmt: skip

    async def test(client: Any) -> None:
        whole = await client.chat.completions.create(model="tiny", messages=HELLO, **fields)
        assert [choice.message.content for choice in whole.choices] == ["Seven."] * 2
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO, functions=[{"name": "f"}])
        assert caught.value.param == "functions"

    with_client(chat_model, ScriptedBackend(tokens_of(chat_model, "Seven.")), test)


def test_models(chat_model: ServedModel) -> None:
    async def test(client: Any) -> None:
        assert [model.id async for model in client.models.list()] == ["tiny", "polite"]
        assert (await client.models.retrieve("polite")).parent == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("rude")
        assert caught.value.code == "model_not_found"

    with_client(chat_model, ScriptedBackend([]), test)


def test_errors_are_those_of_the_client(chat_model: ServedModel) -> None:
    async def test(client: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=[])
        assert caught.value.param == "messages"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="there " * 999)
        assert caught.value.code == "context_length_exceeded"

    async def test_key(client: Any) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()

    with_client(chat_model, ScriptedBackend([]), test)
    with_client(chat_model, ScriptedBackend([]), test_key, key="wrong")


def test_an_error_in_a_stream_is_raised(chat_model: ServedModel) -> None:
    backend = ScriptedBackend(tokens_of(chat_model, "SELECT 1"), losses=[3, 0, 0])

    async def test(client: Any) -> None:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="no replica continued"):
            assert [chunk async for chunk in stream] == []

    with_client(chat_model, backend, test, settings=replace(SETTINGS, replica_timeout_seconds=0))
