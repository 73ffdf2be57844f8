"""What clients send: requests to the supervisor's server, and bodies for the gateway of a served model."""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.control import ControlSignals, SupervisorStatus
from spotune_trainer.supervisor.http_server import ProgressServer
from spotune_trainer.supervisor.pod_api import PodApi
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.fuzz.target import Target
from tests.fuzz.targets.volumes import STATUS
from tests.serve.support.gateway_client import GatewayClient
from tests.serve.support.served_models import load_model

_TIMEOUT_SECONDS = 5.0
REQUESTS = [
    b"GET /progress HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /logs?lines=3 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\n\r\n",
    b'POST /stop HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\nConnection: close\r\n\r\n{"seconds": 60}',
    b"POST /start HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
]


@dataclass
class _Supervisor:
    """A server of a pod's supervisor, and what its handlers have raised."""

    directory: JobDirectory
    server: ProgressServer
    errors: list[BaseException | None] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        return host, int(port)

    def send(self, request: bytes) -> bytes:
        """The response to these bytes."""
        response = bytearray()
        with socket.create_connection(self.address, _TIMEOUT_SECONDS) as connection:
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    response += part
            except OSError:
                pass  # it may close before it has read everything
        return bytes(response)


@cache
def _supervisor() -> _Supervisor:
    """Of this process; its threads end with the process."""
    directory = JobDirectory(Path(tempfile.mkdtemp(prefix="spotune-fuzz-")))
    control = ControlSignals()
    api = PodApi(directory, control, SupervisorStatus(control))
    server = ProgressServer(
        directory, lambda: None, get_routes={"/logs": api.get_routes["/logs"]}, post_routes=api.post_routes
    )
    found = _Supervisor(directory, server)

    class Recording(socketserver.BaseServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            error = sys.exc_info()[1]
            if not isinstance(error, ConnectionError | TimeoutError):
                found.errors.append(error)

    server._server.handle_error = Recording.handle_error.__get__(server._server)  # type: ignore[method-assign]
    return found


def _check_response(supervisor: _Supervisor, response: bytes, allowed: tuple[int, ...]) -> None:
    errors, supervisor.errors = supervisor.errors, []
    if errors and errors[0] is not None:
        raise errors[0]
    if response.startswith(b"HTTP/1."):
        status = int(response.split(b" ", 2)[1])
        assert status < 500 or status in allowed, response


def _running() -> _Supervisor:
    supervisor = _supervisor()
    if not supervisor.server._thread.is_alive():
        supervisor.server._thread.daemon = True
        supervisor.server.__enter__()
    return supervisor


def read_request(request: bytes) -> None:
    """Any bytes as a request: an error status of the client, and the server goes on."""
    supervisor = _running()
    supervisor.directory.status.write_text(json.dumps(STATUS))
    response = supervisor.send(request)
    assert b" 200 " in supervisor.send(b"GET /healthz HTTP/1.0\r\n\r\n")
    _check_response(supervisor, response, (501, 505))  # method or version of HTTP


def read_status_over_http(status: bytes) -> None:
    """Any status.json: JSON and metrics of what can be read, or the reason as a text."""
    supervisor = _running()
    supervisor.directory.status.write_bytes(status)
    for path in (b"metrics", b"progress", b"healthz"):
        response = supervisor.send(b"GET /%s HTTP/1.0\r\n\r\n" % path)
        _check_response(supervisor, response, (500, 503))
        assert response.startswith(b"HTTP/1."), "no response"
        head, _, body = response.partition(b"\r\n\r\n")
        if path == b"metrics" and b" 200 " in head:
            for line in filter(None, body.decode().split("\n")):
                assert line.startswith(("# ", "spotune_")), line


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
BODIES: dict[str, list[Any]] = {
    "/v1/completions": [
        {"model": "tiny", "prompt": "x", "max_tokens": 4, "n": 2, "logprobs": 1, "stop": ["a"], "seed": 1},
        {"model": "polite", "prompt": [[3, 4], [5]], "temperature": 0.5, "top_p": 0.9, "logit_bias": {"3": 1.0}},
        {"model": "tiny", "prompt": [3, 4], "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/chat/completions": [
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"},
        {
            "model": "tiny",
            "messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        },
        {"model": "tiny", "messages": MESSAGES, "stream": True, "top_logprobs": 2, "logprobs": True},
    ],
    "/v1/predict": [
        {"row": {"messages": MESSAGES}, "model": "tiny", "max_new_tokens": 4},
        {"rows": [{"messages": MESSAGES}, {"messages": MESSAGES[1:]}], "temperature": 0.5, "seed": 3},
        {"row": {"messages": MESSAGES}, "stream": True},
    ],
}


@cache
def _gateway() -> GatewayClient:
    client = GatewayClient(load_model(Path(tempfile.mkdtemp()), messages="messages", chat=True), "ok")
    client.__enter__()  # one event loop for all requests: a new one for each was cancelled at times
    return client


def read_body(content: tuple[str, bytes, dict[str, str]]) -> None:
    """Any body: an answer, or an error of the client in OpenAI's format."""
    path, body, headers = content
    response = _gateway().post(path, content=body, headers={"Content-Type": "application/json"} | headers)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"], error


_HEADER_VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
_HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Authorization", "X-Request-Id", "traceparent", "Accept"]),
    _HEADER_VALUES,
    max_size=2,
)
_BODIES = st.one_of(
    *(st.tuples(st.just(path), changed_json(bodies), st.just({}) | _HEADERS) for path, bodies in BODIES.items())
)

TARGETS = (
    Target("supervisor", "requests to the supervisor in the head pod", changed_bytes(REQUESTS), read_request, 60),
    Target(
        "progress", "status.json, as the supervisor publishes it", changed_json([STATUS]), read_status_over_http, 60
    ),
    Target("gateway", "requests to a served model: OpenAI's API and /v1/predict", _BODIES, read_body, 60),
)
