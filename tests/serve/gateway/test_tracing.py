"""Each request is one span, which a collector gets by OTLP over HTTP. The collector of these tests is a real server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings, hash_key
from tests.serve.support.gateway_client import GatewayClient, tokens_of
from tests.serve.support.scripted_backend import ScriptedBackend

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROUTE = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "how many"}]


@dataclass
class Collector:
    """What an OTLP receiver got.

    Attributes:
        url: its address.
        requests: the bodies, as protobuf messages.
    """

    url: str
    requests: list[Any] = field(default_factory=list)

    @property
    def spans(self) -> list[Any]:
        return [
            span for request in self.requests for r in request.resource_spans for s in r.scope_spans for span in s.spans
        ]

    @property
    def resource(self) -> dict[str, Any]:
        return attributes(self.requests[0].resource_spans[0].resource)


def attributes(item: Any) -> dict[str, Any]:
    """The attributes of a span, an event or a resource."""
    return {pair.key: _value(pair.value) for pair in item.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector to which gateways send their spans."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def test_span_has_tokens_reasons_and_resumptions(chat_model: ServedModel, collector: Collector) -> None:
    answer = tokens_of(chat_model, "Seven.")
    backend = ScriptedBackend(answer, losses=[2, 1])
    with GatewayClient(chat_model, backend, GatewaySettings(retry_seconds=0)) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"model": "tiny", "messages": HELLO, "stream": True, "temperature": 0.5}
        response = client.post(ROUTE, json=body, headers=headers)
    assert response.status_code == 200
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "chat tiny"
    assert span.kind == span.SPAN_KIND_SERVER
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.input_tokens"] == len(backend.requests[0].prompt)
    assert found["gen_ai.usage.output_tokens"] == len(answer) + 1  # with the end-of-text token
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["http.response.status_code"] == 200
    assert found["spotune.request.id"] == response.headers["x-request-id"]
    assert found["gen_ai.response.time_to_first_chunk"] > 0
    events = [(event.name, attributes(event)) for event in span.events]
    assert events == [
        ("gen_ai.first_token", {"spotune.answer": 0}),
        ("spotune.resumption", {"spotune.answer": 0, "spotune.token_position": 2}),
        ("spotune.resumption", {"spotune.answer": 0, "spotune.token_position": 3}),
    ]
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert collector.resource["service.name"] == "spotune-gateway"


def test_span_counts_all_answers(
    chat_model: ServedModel, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "text-to-sql")
    with GatewayClient(chat_model, "SELECT 1") as client:
        usage = client.ask("/v1/completions", model="tiny", prompt=["a", "b c"], n=2, max_tokens=3)["usage"]
    found = attributes(collector.spans[0])
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert found["gen_ai.request.choice.count"] == 4
    assert collector.resource["service.name"] == "text-to-sql"


def test_span_has_no_text_of_prompt_or_answer(chat_model: ServedModel, collector: Collector) -> None:
    with GatewayClient(chat_model, "the answer") as client:
        client.ask(ROUTE, model="tiny", messages=[{"role": "user", "content": "a secret"}])
        client.refuse(ROUTE, {"model": "a secret", "messages": HELLO})
    assert len(collector.spans) == 2
    assert not any(
        text in request.SerializeToString() for request in collector.requests for text in (b"secret", b"the answer")
    )


def test_failures_are_marked(chat_model: ServedModel, collector: Collector) -> None:
    ready, backend = ScriptedBackend(tokens_of(chat_model, "Seven."), losses=[2]), ScriptedBackend([])
    backend.ready = False
    settings = GatewaySettings(api_keys=(hash_key("secret"),), replica_timeout_seconds=0)
    key = {"authorization": "Bearer secret"}
    with GatewayClient(chat_model, backend, settings) as client:
        assert client.post(ROUTE, json={"model": "tiny", "messages": HELLO}).status_code == 401
        assert client.post(ROUTE, json={"model": "tiny", "messages": HELLO}, headers=key).status_code == 503
    with GatewayClient(chat_model, ready, settings) as client:
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        assert client.post(ROUTE, json=body, headers=key).status_code == 200
    refused, unavailable, broken = collector.spans
    assert refused.name == f"POST {ROUTE}"
    assert refused.status.code == refused.status.STATUS_CODE_UNSET  # as OpenTelemetry wants it for a client's errors
    assert unavailable.status.code == unavailable.status.STATUS_CODE_ERROR
    assert attributes(unavailable)["error.type"] == "503"
    assert broken.status.code == broken.status.STATUS_CODE_ERROR
    assert attributes(broken)["gen_ai.response.finish_reasons"] == ["error"]


def test_other_paths_have_no_span(chat_model: ServedModel, collector: Collector) -> None:
    with GatewayClient(chat_model, "ok") as client:
        for path in ("/", "/healthz", "/metrics", "/v1/models"):
            assert client.get(path).status_code == 200
    assert collector.spans == []


def test_sampler_of_the_environment_is_used(
    chat_model: ServedModel, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with GatewayClient(chat_model, "ok") as client:
        client.ask(ROUTE, model="tiny", messages=HELLO)
    assert collector.spans == []


def test_other_protocols_are_warned_about(
    chat_model: ServedModel, collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with GatewayClient(chat_model, "ok") as client:
        client.ask(ROUTE, model="tiny", messages=HELLO)
    assert "no traces: the protocol is grpc" in caplog.text
    assert collector.spans == []


def test_opentelemetry_is_not_imported_without_an_endpoint() -> None:
    program = (
        "import sys; from spotune_serve.gateway import tracing; from spotune_serve.gateway.routes import app;"
        "assert tracing.tracer_provider() is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"
