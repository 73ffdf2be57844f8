"""The gateway around its API: keys, limits, errors, disconnects, models, health and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from spotune_serve.engine.base import PromptTooLongError, UnknownAdapterError, UnsupportedFormatError
from spotune_serve.gateway.routes.app import create_app
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings, hash_key
from tests.serve.support.gateway_client import GatewayClient, read_events, tokens_of
from tests.serve.support.scripted_backend import ScriptedBackend
from tests.serve.support.versions import single_version

COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "prompt": "x"}
KEYS = GatewaySettings(api_keys=(hash_key("first"), hash_key("second")))


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "Basic first", "first"])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", COMPLETIONS), ("POST", "/v1/predict"), ("GET", "/v1/models"), ("GET", "/v1/predict")]
)
def test_requests_without_a_valid_key_are_refused(
    chat_model: ServedModel, method: str, path: str, header: str | None
) -> None:
    client = GatewayClient(chat_model, "ok", KEYS)
    headers = {"Authorization": header} if header is not None else {}
    response = client.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert client.backend.requests == []


@pytest.mark.parametrize("key", ["first", "second"])
def test_each_key_is_valid(chat_model: ServedModel, key: str) -> None:
    client = GatewayClient(chat_model, "ok", KEYS)
    response = client.post(COMPLETIONS, json=BODY, headers={"Authorization": f"bearer {key}"})
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/stats", "/"])
def test_health_metrics_stats_and_page_need_no_key(chat_model: ServedModel, path: str) -> None:
    assert GatewayClient(chat_model, "ok", KEYS).get(path).status_code == 200


def test_a_response_has_the_request_id_of_the_logs(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "ok")
    response = client.post(COMPLETIONS, json=BODY)
    request_id = response.headers["x-request-id"]
    assert response.json()["id"] == f"cmpl-{request_id}"
    assert client.backend.requests[0].request_id == f"{request_id}-0"


def test_models_are_listed_with_their_adapters(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "ok")
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [(m["id"], m["object"], m["parent"], m["max_model_len"]) for m in models["data"]] == [
        ("tiny", "model", None, 256),
        ("polite", "model", "tiny", 256),
    ]
    assert client.get("/v1/models/polite").json() == models["data"][1]
    response = client.get("/v1/models/rude")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(chat_model: ServedModel, chunked: bool) -> None:
    client = GatewayClient(chat_model, "ok", GatewaySettings(max_body_bytes=1000))
    content = json.dumps({**BODY, "prompt": "x" * 1000}).encode()
    response = client.post(
        COMPLETIONS, content=iter([content]) if chunked else content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("content", "content_type", "message"),
    [
        (b'{"model": ', "application/json", "not valid JSON"),
        (b'{"model": "tiny"}', "application/x-www-form-urlencoded", "Content-Type: application/json"),
        (b"[1]", "application/json", "must be a JSON object"),
        (b"", "application/json", "required"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(
    chat_model: ServedModel, content: bytes, content_type: str, message: str
) -> None:
    response = GatewayClient(chat_model, "ok").post(
        COMPLETIONS, content=content, headers={"Content-Type": content_type}
    )
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 404), ("GET", COMPLETIONS, 405)])
def test_unknown_paths_and_methods_have_openais_error(
    chat_model: ServedModel, method: str, path: str, status: int
) -> None:
    response = GatewayClient(chat_model, "ok").request(method, path)
    assert response.status_code == status
    message = response.json()["error"]["message"]
    assert path in message
    assert COMPLETIONS in message
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLongError("9 tokens do not fit into 8"), 400, "context_length_exceeded"),
        (UnknownAdapterError("no adapter polite"), 404, "model_not_found"),
        (UnsupportedFormatError("this service runs on vLLM"), 400, None),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_before_the_first_token_are_statuses(
    chat_model: ServedModel, error: Exception, status: int, code: str | None, stream: bool
) -> None:
    client = GatewayClient(chat_model, "ok")
    client.backend.error = error
    found, body = client.refuse(COMPLETIONS, {**BODY, "stream": stream})
    assert (found, body["code"]) == (status, code)
    assert "secret" not in body["message"]
    assert client.metric("vllm:num_requests_waiting") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_no_replica_is_503(chat_model: ServedModel, stream: bool) -> None:
    client = GatewayClient(chat_model, "ok")
    client.backend.ready = False
    response = client.post(COMPLETIONS, json={**BODY, "stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["type"] == "server_error"
    health = client.get("/healthz")
    assert (health.status_code, health.json()["reason"]) == (503, "no replica is ready")


def test_an_error_after_the_first_token_is_the_last_event(chat_model: ServedModel) -> None:
    backend = ScriptedBackend(tokens_of(chat_model, "SELECT 1"), losses=[3] + [0] * 9)
    client = GatewayClient(chat_model, backend, GatewaySettings(retry_seconds=0, replica_timeout_seconds=0))
    response = client.post(COMPLETIONS, json={**BODY, "stream": True})
    events = [json.loads(event) for event in read_events(response.text)]
    assert "choices" in events[-2]
    assert events[-1]["error"]["code"] == "no_replica"


def run_with_backend(
    model: ServedModel,
    settings: GatewaySettings,
    test: Callable[[httpx.AsyncClient, ScriptedBackend], Awaitable[None]],
    *,
    gate_at: int = 0,
) -> None:
    """Run a test whose backend waits for a gate."""

    async def run() -> None:
        backend = ScriptedBackend(tokens_of(model, "SELECT 1"))
        backend.gate, backend.gate_at = asyncio.Event(), gate_at
        transport = httpx.ASGITransport(create_app(await single_version(model, backend, settings)))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await test(client, backend)

    asyncio.run(asyncio.wait_for(run(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the conditions have no event
        await asyncio.sleep(0.001)


def test_requests_beyond_the_waiting_limit_are_refused(chat_model: ServedModel) -> None:
    async def test(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
        first = asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "n": 2}))
        await until(lambda: len(backend.requests) == 2)
        metrics = (await client.get("/metrics")).text
        assert 'vllm:num_requests_waiting{model_name="tiny",model_version="tiny-1"} 2.0' in metrics
        refused = await client.post(COMPLETIONS, json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert backend.gate is not None
        backend.gate.set()
        assert (await first).status_code == 200
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200

    run_with_backend(chat_model, GatewaySettings(max_waiting_requests=2), test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_aborted(chat_model: ServedModel, stream: bool) -> None:
    async def test(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
        response = await client.post(COMPLETIONS, json={**BODY, "stream": stream})
        if stream:
            error = json.loads(read_events(response.text)[-1])["error"]
        else:
            assert response.status_code == 504
            error = response.json()["error"]
        assert error["code"] == "request_timeout"
        assert backend.closed == 1

    run_with_backend(chat_model, GatewaySettings(request_timeout_seconds=0.5), test, gate_at=2)


async def request_and_leave(app: Any, body: dict[str, Any], leave: asyncio.Event, sent: list[dict[str, Any]]) -> None:
    """Send a request by ASGI, and leave when the event is set."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers, "query_string": b""}
    await app({**scope, "asgi": {"version": "3.0", "spec_version": "2.4"}}, receive, send)


@pytest.mark.parametrize("gate_at", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_sequences(chat_model: ServedModel, stream: bool, gate_at: int) -> None:
    async def test() -> None:
        backend = ScriptedBackend(tokens_of(chat_model, "SELECT 1"))
        backend.gate, backend.gate_at = asyncio.Event(), gate_at
        app = create_app(await single_version(chat_model, backend, GatewaySettings()))
        leave = asyncio.Event()
        sent: list[dict[str, Any]] = []
        task = asyncio.create_task(request_and_leave(app, {**BODY, "n": 2, "stream": stream}, leave, sent))
        expected_messages = 5 if stream and gate_at else 0  # headers and two tokens of each answer
        await until(lambda: len(backend.requests) == 2 and len(sent) >= expected_messages)
        await asyncio.sleep(0.01)
        leave.set()
        await task
        assert backend.closed == 2
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            metrics = (await client.get("/metrics")).text
        assert (
            'vllm:request_success_total{finished_reason="abort",model_name="tiny",model_version="tiny-1"} 2.0'
            in metrics
        )
        assert 'vllm:num_requests_running{model_name="tiny",model_version="tiny-1"} 0.0' in metrics
        assert 'vllm:num_requests_waiting{model_name="tiny",model_version="tiny-1"} 0.0' in metrics

    asyncio.run(asyncio.wait_for(test(), 60))


def test_metrics_count_sequences_and_tokens(chat_model: ServedModel) -> None:
    client = GatewayClient(chat_model, "SELECT 1")
    usage = client.ask(COMPLETIONS, **BODY, n=2, max_tokens=99)["usage"]
    client.ask(COMPLETIONS, **BODY, max_tokens=1)
    count = usage["completion_tokens"]
    assert client.metric("vllm:prompt_tokens_total") == 3 * usage["prompt_tokens"]
    assert client.metric("vllm:generation_tokens_total") == count + 1
    assert client.metric("vllm:request_success_total", finished_reason="stop") == 2
    assert client.metric("vllm:request_success_total", finished_reason="length") == 1
    assert client.metric("vllm:time_to_first_token_seconds_count") == 3
    assert client.metric("vllm:inter_token_latency_seconds_count") == count - 2
    assert client.metric("vllm:e2e_request_latency_seconds_count", model_name="tiny") == 3
    assert client.metric("vllm:request_prompt_tokens_count") == 3
    assert client.metric("vllm:request_prompt_tokens_sum") == 3 * usage["prompt_tokens"]
    assert client.metric("vllm:request_generation_tokens_sum") == count + 1
    assert client.metric("vllm:request_generation_tokens_bucket", le="1.0") == 1, "that of max_tokens: 1"
    assert client.metric("vllm:num_requests_running") == client.metric("vllm:num_requests_waiting") == 0
    assert client.metric("spotune:stream_resumptions_total") == 0
