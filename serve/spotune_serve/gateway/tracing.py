"""OpenTelemetry traces: one span per request, sent to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names.

Without that variable nothing of OpenTelemetry is imported. Spans have no text of prompts or answers. Their attributes
are those of OpenTelemetry's semantic conventions for HTTP servers and for generative AI.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotune_serve.engine.base import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/predict": "text_completion"}
"""Traced paths, and their `gen_ai.operation.name`."""
_FIRST_SERVER_STATUS = 500
_OTHER_ERROR = "_OTHER"
"""OpenTelemetry's `error.type` for errors without a class of their own."""

_current: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)


def current_trace() -> RequestTrace | None:
    """The trace of the request that this task answers; None if it is not traced."""
    return _current.get()


class RequestTrace:
    """What the span of one request says about its answers.

    Args:
        span: of the request.
        operation: its `gen_ai.operation.name`.
    """

    def __init__(self, span: Span, operation: str) -> None:
        self._span = span
        self._operation = operation
        self._start = time.monotonic()
        self._output_tokens = 0
        self._reasons: dict[int, str] = {}
        self._has_first_token = False

    def start(self, model: str, sampling: SamplingParams, num_prompt_tokens: int, num_answers: int) -> None:
        """The request is valid: its answers will be generated.

        Args:
            model: id of the model or adapter.
            sampling: parameters that all answers share.
            num_prompt_tokens: tokens of all prompts; a prompt with several answers counts once.
            num_answers: answers of the request.
        """
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.choice.count": num_answers,
                "gen_ai.usage.input_tokens": num_prompt_tokens,
            }
        )

    def add_first_token(self, answer: int) -> None:
        """The first token of an answer has arrived."""
        self._span.add_event("gen_ai.first_token", {"spotune.answer": answer})
        if not self._has_first_token:
            self._has_first_token = True
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._start)

    def add_resumption(self, answer: int, num_tokens: int) -> None:
        """An answer was sent to another replica after its own was lost.

        Args:
            answer: its index.
            num_tokens: tokens that it has so far; it continues after them.
        """
        self._span.add_event("spotune.resumption", {"spotune.answer": answer, "spotune.token_position": num_tokens})

    def finish(self, answer: int, num_tokens: int, reason: str | None) -> None:
        """An answer has ended: `stop`, `length` or `abort`; None after an error."""
        self._output_tokens += num_tokens
        self._reasons[answer] = reason or "error"
        self._span.set_attribute("gen_ai.usage.output_tokens", self._output_tokens)
        self._span.set_attribute(
            "gen_ai.response.finish_reasons", [self._reasons[key] for key in sorted(self._reasons)]
        )
        if reason is None:
            self.fail("an answer failed")

    def fail(self, description: str, error_type: str = _OTHER_ERROR) -> None:
        """Mark the span as failed."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", error_type)
        self._span.set_status(Status(StatusCode.ERROR, description))


class TracingMiddleware:
    """Records a span for each request that generates, as a child of the client's span (W3C `traceparent`).

    Args:
        app: what answers requests.
        provider: makes and exports the spans; shut down with the application.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._provider = provider
        self._tracer = provider.get_tracer("spotune_serve")
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await asyncio.to_thread(self._provider.shutdown)
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _OPERATIONS:
            await self._traced(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.trace import SpanKind

        path = scope["path"]
        span = self._tracer.start_span(
            f"POST {path}",
            self._propagator.extract(dict(Headers(scope=scope))),
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "http.route": path,
                "url.path": path,
                "gen_ai.operation.name": _OPERATIONS[path],
                "gen_ai.provider.name": "spotune",
            },
        )
        trace = RequestTrace(span, _OPERATIONS[path])

        async def send_with_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if status >= _FIRST_SERVER_STATUS:
                    trace.fail(f"HTTP status {status}", str(status))
            await send(message)

        token = _current.set(trace)
        try:
            await self._app(scope, receive, send_with_status)
        finally:
            _current.reset(token)
            span.set_attribute("spotune.request.id", scope.get("state", {}).get("request_id", ""))
            span.end()


def tracer_provider() -> TracerProvider | None:
    """What exports spans by OTLP over HTTP; None if no endpoint is set.

    OpenTelemetry's SDK reads the other standard variables itself, such as OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and
    OTEL_EXPORTER_OTLP_HEADERS.
    """
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), _PROTOCOL)
    if protocol != _PROTOCOL:
        logger.warning("no traces: the protocol is %s; set %s=%s", protocol, _PROTOCOLS[1], _PROTOCOL)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("no traces: %s; install spotune[serve]", error)
        return None
    resource = Resource.create({"service.name": "spotune-gateway"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
