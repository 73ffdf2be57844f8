"""The gateway's HTTP application: OpenAI's API, `/v1/predict`, health, metrics and a page."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
import uuid
from http import HTTPStatus
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotune_serve.engine.base import PromptTooLongError, UnknownAdapterError, UnsupportedFormatError
from spotune_serve.gateway.answers import api_error_of
from spotune_serve.gateway.api_keys import ApiKeyFile
from spotune_serve.gateway.backend import NoReplicaError
from spotune_serve.gateway.routes.openai_api import openai_routes
from spotune_serve.gateway.routes.predict_api import predict_routes
from spotune_serve.gateway.routes.stats_api import ReplicaReport, no_replicas, stats_routes
from spotune_serve.gateway.settings import GatewaySettings, hash_key
from spotune_serve.gateway.tracing import TracingMiddleware, tracer_provider
from spotune_serve.gateway.versions import VERSION_HEADER, Versions
from spotune_serve.protocol.errors import ApiError, validation_error
from spotune_serve.protocol.models import ModelCard, ModelList

_API_PREFIX = "/v1/"
_CLIENT_CLOSED_REQUEST = 499


def create_app(versions: Versions, replicas: ReplicaReport = no_replicas, keys: ApiKeyFile | None = None) -> FastAPI:
    """The gateway of one model, its versions and their adapters.

    Args:
        versions: what answers requests. Their list may change while the gateway runs.
        replicas: reports the states of the replicas for `/stats`.
        keys: the valid API keys; None: those of the settings.
    """
    app = FastAPI(title=f"spotune: {versions.name}", docs_url=None, redoc_url=None)
    app.include_router(openai_routes(versions))
    app.include_router(predict_routes(versions))
    app.include_router(stats_routes(versions, replicas))
    _add_model_routes(app, versions)
    _add_operations_routes(app, versions)
    _add_page(app)
    _add_error_handlers(app, versions.settings)
    app.add_middleware(AccessMiddleware, settings=versions.settings, keys=keys)
    provider = tracer_provider()
    if provider is not None:
        app.add_middleware(TracingMiddleware, provider=provider)
    return app


class AccessMiddleware:
    """Checks the API key and the size of the body before a request is read. Responses get an id and their version."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, keys: ApiKeyFile | None) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = request_id
                if "version" in state:
                    response_headers[VERSION_HEADER] = state["version"]
            await send(message)

        headers = Headers(scope=scope)
        try:
            if scope["path"].startswith(_API_PREFIX) or scope["path"] == "/openapi.json":
                self._check_key(headers)
            self._check_size(int(headers.get("content-length") or 0))
        except (ApiError, ValueError) as error:
            refusal = error if isinstance(error, ApiError) else ApiError(400, "Content-Length is not a number.")
            await _error_response(refusal)(scope, receive, send_with_id)
            return
        await self._app(scope, self._limited(receive), send_with_id)

    def _check_key(self, headers: Headers) -> None:
        digests = self._keys.digests() if self._keys is not None else self._settings.api_keys
        if self._keys is None and not digests:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hash_key(key.strip()) if scheme.lower() == "bearer" else ""
        # All are compared: the time must not show which one was equal.
        if not sum(hmac.compare_digest(digest, valid) for valid in digests):
            message = "The API key is wrong." if key else "An API key is needed: send 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_size(self, size: int) -> None:
        limit = self._settings.max_body_bytes
        if size > limit:
            message = f"The body is larger than {limit} bytes. Send fewer or shorter prompts."
            raise ApiError(413, message, code="request_too_large")

    def _limited(self, receive: Receive) -> Receive:
        """Count the bytes of bodies without a Content-Length."""
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            self._check_size(size)
            return message

        return receive_limited


def _add_model_routes(app: FastAPI, versions: Versions) -> None:
    created = int(time.time())

    def cards() -> dict[str, ModelCard]:
        """The model, and the adapters of all its versions. The version with the largest weight comes first."""
        found: dict[str, ModelCard] = {}
        for version, _weight in reversed(versions.listed):
            for name in (versions.name, *version.model.adapters):
                found[name] = ModelCard(
                    id=name,
                    created=created,
                    root=versions.name,
                    parent=None if name == versions.name else versions.name,
                    max_model_len=version.model.max_sequence_length,
                    version=version.name,
                )
        first = (versions.name, *versions.main_model.adapters)
        return {name: found.pop(name) for name in first} | found

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=list(cards().values()))

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> ModelCard:
        found = cards()
        if name not in found:
            versions.main_model.adapter(name)  # raises the error that lists the names
        return found[name]


def _add_operations_routes(app: FastAPI, versions: Versions) -> None:
    @app.get("/healthz")
    async def report_health() -> Response:
        try:
            ready, reason = await versions.is_ready(), "no replica is ready"
        except NoReplicaError as error:
            ready, reason = False, str(error)
        if ready:
            return JSONResponse({"status": "ok"})
        headers = {"Retry-After": str(versions.settings.retry_after_seconds)}
        return JSONResponse({"status": "unavailable", "reason": reason}, 503, headers)

    @app.get("/metrics")
    async def report_metrics() -> Response:
        return Response(versions.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    page = resources.files("spotune_serve.gateway.routes").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _content_policy(page), "X-Content-Type-Options": "nosniff"}

    @app.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=headers)


def _content_policy(page: str) -> str:
    """Scripts and styles of the page itself only, and requests to this service only."""

    def hashes(tag: str) -> str:
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [hashlib.sha256(content.encode("utf-8")).digest() for content in contents]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def _add_error_handlers(app: FastAPI, settings: GatewaySettings) -> None:
    """Every error has OpenAI's format."""

    @app.exception_handler(RequestValidationError)
    async def report_invalid_body(request: Request, error: RequestValidationError) -> Response:
        if not isinstance(error.body, dict) and "json" not in request.headers.get("content-type", ""):
            return _error_response(ApiError(400, "The body must be JSON, with 'Content-Type: application/json'."))
        return _error_response(validation_error(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def report_http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ApiError):  # raised while FastAPI read the body
            return _error_response(error.__cause__)
        message = f"{error.detail}: {request.method} {request.url.path}"
        if error.status_code == HTTPStatus.NOT_FOUND:
            message += f". The paths of this service: {', '.join(app.openapi()['paths'])}."
        return _error_response(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(ClientDisconnect)
    async def close(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def report_error(_request: Request, error: Exception) -> Response:
        return _error_response(api_error_of(error, settings))

    expected = (ApiError, NoReplicaError, PromptTooLongError, UnknownAdapterError, UnsupportedFormatError)
    for error_type in (*expected, Exception):
        app.add_exception_handler(error_type, report_error)
