"""HTTP server of a run: `/progress` for programs and people, `/metrics` for Prometheus, `/healthz` for the kubelet.

Each response is made from `status.json` at the time of the request; the server keeps no state.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType, TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from spotune_trainer.files import UnreadableFileError
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import read_status
from spotune_trainer.observability.surviving_workers import SurvivingWorkers

_POLL_SECONDS = 0.05
_STREAM_POLL_SECONDS = 1.0
_IDLE_TIMEOUT_SECONDS = 60
"""A connection is closed after this time without a request, or without progress in sending."""
_MAX_BODY_BYTES = 4096
_MAX_DISCARDED_BLOCKS = 256
_MAX_COUNT = 1 << 63
_GAUGES = {
    "step": ("step", "Optimizer steps done."),
    "totalSteps": ("total_steps", "Optimizer steps of the whole run."),
    "epoch": ("epoch", "Passes over the training data."),
    "loss": ("loss", "Training loss of the last step, per token."),
    "evalLoss": ("eval_loss", "Loss of the last evaluation, per token."),
    "learningRate": ("learning_rate", "Learning rate of the last step."),
    "gradNorm": ("gradient_norm", "Norm of the last step's gradients before clipping."),
    "tokensPerSecond": (
        "tokens_per_second",
        "Tokens that go through the model per second, without padding, over all workers.",
    ),
    "samplesPerSecond": ("samples_per_second", "Samples trained on per second, over all workers."),
    "mfu": ("mfu_ratio", "Model FLOPs utilisation."),
    "etaSeconds": ("eta_seconds", "Estimated time to the last step."),
    "generation": ("generation", "Worker groups started so far."),
    "attempt": ("attempt", "Drivers started so far."),
    "goodput": ("goodput_ratio", "Productive time over wall clock, over all generations."),
}


@dataclass(frozen=True)
class Response:
    """A complete response.

    Attributes:
        content_type: media type without charset.
    """

    status: HTTPStatus
    content_type: str
    body: str


@dataclass(frozen=True)
class StreamingResponse:
    """A response that is sent in parts, possibly without end.

    Attributes:
        parts: yields the parts. It gets a function that waits briefly and returns whether the client is connected.
    """

    parts: Callable[[Callable[[], bool]], Iterator[str]]


Query = Mapping[str, str]
"""Query parameters of a URL; of a repeated parameter the last value."""


class ProgressServer:
    """Serves one job's progress from its own threads; a context manager.

    Args:
        directory: of the job.
        health_problem: returns why the job is unhealthy, or None; called for `/healthz`.
        host: address to listen on.
        port: 0 for any free port.
        get_routes: handlers of GET by path, added to the default ones or replacing them.
        post_routes: handlers of POST by path, called with the body.
    """

    def __init__(
        self,
        directory: JobDirectory,
        health_problem: Callable[[], str | None],
        host: str = "127.0.0.1",
        port: int = 0,
        get_routes: Mapping[str, Callable[[Query], Response | StreamingResponse]] = MappingProxyType({}),
        post_routes: Mapping[str, Callable[[bytes], Response]] = MappingProxyType({}),
    ) -> None:
        class Handler(_Handler):
            pass

        surviving = SurvivingWorkers(directory)

        def shown() -> dict[str, Any] | None:
            status = read_status(directory)
            return surviving.shown(status, status["ageSeconds"]) if status is not None else None

        Handler.get_routes = {
            "/progress": lambda _: _progress_response(shown()),
            "/metrics": lambda _: _metrics_response(shown()),
            "/healthz": lambda _: _health_response(health_problem()),
            **get_routes,
        }
        Handler.post_routes = post_routes
        Handler.closing = self._closing = threading.Event()
        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="progress-server", daemon=True
        )

    @property
    def url(self) -> str:
        """The server's URL on this machine."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Calls the handler of the request's method and path."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_TIMEOUT_SECONDS
    get_routes: Mapping[str, Callable[[Query], Response | StreamingResponse]]
    post_routes: Mapping[str, Callable[[bytes], Response]]
    closing: threading.Event

    def do_GET(self) -> None:
        """Respond by the path's handler, or list the paths that exist."""
        url = urlsplit(self.path)
        handler = self.get_routes.get(url.path)
        if handler is None:
            self._send_unknown(url.path, self.post_routes, "POST")
            return
        try:
            response = handler(dict(parse_qsl(url.query)))
        except (OSError, UnreadableFileError) as error:  # the volume is unavailable, or the status is damaged
            response = Response(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n")
        if isinstance(response, Response):
            self._send(response)
        else:
            self._stream(response)

    def do_POST(self) -> None:
        """Call the path's handler with the body, or list the paths that exist."""
        path = urlsplit(self.path).path
        handler = self.post_routes.get(path)
        length = self.headers.get("Content-Length", "0")
        if handler is None:
            self._send_unknown(path, self.get_routes, "GET")
            self._discard_body()
        elif "Transfer-Encoding" in self.headers or not is_number_up_to(length, _MAX_BODY_BYTES):
            reason = f"send a body with a Content-Length of at most {_MAX_BODY_BYTES} bytes\n"
            self._send(Response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "text/plain", reason))
            self._discard_body()
        else:
            self._send(handler(self.rfile.read(int(length))))

    def _discard_body(self) -> None:
        """Read and drop the body before closing: closing at once would reset the connection and lose the response."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_STREAM_POLL_SECONDS)
            for _ in range(_MAX_DISCARDED_BLOCKS):
                if not self.connection.recv(_MAX_BODY_BYTES):
                    return

    def _send_unknown(self, path: str, other_routes: Mapping[str, Any], method: str) -> None:
        if path in other_routes:
            message = f"{path} accepts only {method}\n"
            self._send(Response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", message), allow=method)
            return
        known = ", ".join([*self.get_routes, *(f"POST {name}" for name in self.post_routes)])
        self._send(Response(HTTPStatus.NOT_FOUND, "text/plain", f"unknown path; available: {known}\n"))

    def _send(self, response: Response, allow: str = "") -> None:
        content = response.body.encode(errors="replace")
        self.send_response(response.status)
        self.send_header("Content-Type", f"{response.content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if allow:
            self.send_header("Allow", allow)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, response: StreamingResponse) -> None:
        """Send the parts as they come: chunked, or for HTTP/1.0 until the connection is closed."""
        chunked = self.request_version != "HTTP/1.0"
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(ConnectionError, TimeoutError):  # the client has closed the connection
            for text in response.parts(self._client_is_connected):
                content = text.encode(errors="replace")
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content) if chunked else content)
            if chunked:
                self.wfile.write(b"0\r\n\r\n")

    def _client_is_connected(self) -> bool:
        """Wait briefly; returns whether the client is still connected and the server still runs."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN | select.POLLHUP)
        if poll.poll(_STREAM_POLL_SECONDS * 1000):
            if self.connection.recv(1, socket.MSG_PEEK) == b"":
                return False
            time.sleep(_STREAM_POLL_SECONDS)  # the client has sent unexpected data; leave it unread
        return not self.closing.is_set()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing for requests."""


def is_number_up_to(text: str, most: int) -> bool:
    """Whether a text is a whole number up to `most`. Python refuses to convert thousands of digits."""
    return text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most


def _progress_response(status: dict[str, Any] | None) -> Response:
    if status is None:
        text = '{"message": "the driver has not started yet"}\n'
        return Response(HTTPStatus.SERVICE_UNAVAILABLE, "application/json", text)
    return Response(HTTPStatus.OK, "application/json", json.dumps(status) + "\n")


def _health_response(health_problem: str | None) -> Response:
    if health_problem is not None:
        return Response(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", health_problem + "\n")
    return Response(HTTPStatus.OK, "text/plain", "ok\n")


def _metrics_response(status: dict[str, Any] | None) -> Response:
    lines = metrics_lines(status or {})
    return Response(HTTPStatus.OK, "text/plain; version=0.0.4", "".join(f"{line}\n" for line in lines))


def metrics_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Lines in Prometheus' text format for a status with `ageSeconds`; what is unknown or no number is omitted."""
    for field, (name, meaning) in _GAUGES.items():
        yield from _metric(name, "gauge", meaning, {"": status.get(field)})
    scores = _labelled("metric", status.get("evalScores"))
    yield from _metric("eval_score", "gauge", "Scores of the last evaluation's answers.", scores)
    yield from _metric("status_age_seconds", "gauge", "Age of this status.", {"": status.get("ageSeconds")})
    checkpoint = _mapping(status.get("lastCheckpoint"))
    yield from _metric("checkpoint_step", "gauge", "Step of the last commit.", {"": checkpoint.get("step")})
    yield from _metric(
        "checkpoint_timestamp_seconds", "gauge", "Unix time of the last commit.", {"": checkpoint.get("time")}
    )
    workers = _labelled("state", status.get("workers"))
    yield from _metric("workers", "gauge", "Workers running and desired.", workers)
    restarts = _labelled("cause", status.get("restarts"))
    yield from _metric("restarts_total", "counter", "Ends of worker groups and drivers by cause.", restarts)
    yield from _metric("steps_lost_total", "counter", "Steps trained and then lost.", {"": status.get("stepsLost")})
    parts = _labelled("part", status.get("goodputParts"))
    yield from _metric("time_seconds", "gauge", "Where the time went; the parts sum to the wall clock.", parts)
    phase = _labelled("phase", {str(status["phase"]): 1} if "phase" in status else {})
    yield from _metric("phase", "gauge", "1 for the current phase.", phase)


def _labelled(label: str, values: Any) -> dict[str, Any]:
    """Samples by label, from values by name. Quotes and line breaks in a name would begin other labels and lines."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": " "})
    return {f'{{{label}="{name.translate(escapes)}"}}': value for name, value in _mapping(values).items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _metric(name: str, kind: str, meaning: str, samples: Mapping[str, Any]) -> Iterator[str]:
    known = {
        labels: value
        for labels, value in samples.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) < _MAX_COUNT)
    }
    if known:
        yield f"# HELP spotune_{name} {meaning}"
        yield f"# TYPE spotune_{name} {kind}"
    for labels, value in known.items():
        yield f"spotune_{name}{labels} {value:.17g}"
