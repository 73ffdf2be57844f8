"""The Jobs API client against a server that responds correctly, wrongly, late and never."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError


class JobsServer(ThreadingHTTPServer):
    """The part of the Jobs API that the client uses; can answer a submission only once somebody has found it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.answers_late = False
        self.found = threading.Event()
        self.tokens: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    server: JobsServer

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        name = self.path.removeprefix("/api/jobs/").removesuffix("/logs")
        if self.path == "/api/version":
            self.answer(200, {"ray_version": "2.60.0"})
        elif not name:
            self.answer(200, [*self.server.jobs.values(), {"type": "DRIVER", "submission_id": None}])
        elif name not in self.server.jobs:
            self.answer(404, "does not exist")
        else:
            self.server.found.set()
            self.answer(200, {"logs": "hello"} if self.path.endswith("/logs") else self.server.jobs[name])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.path.endswith("/stop"):
            self.answer(404, "does not exist")
            return
        name = body["submission_id"]
        if name in self.server.jobs:
            self.answer(400, f"Job with submission_id {name} already exists")
            return
        record = {"driver_exit_code": 20, "message": None}
        self.server.jobs[name] = {**body, "status": "FAILED", **record}
        if self.server.answers_late:
            assert self.server.found.wait(60)
        self.answer(200, {"submission_id": name})

    def answer(self, code: int, value: Any) -> None:
        self.send_response(code)
        self.end_headers()
        try:
            self.wfile.write(json.dumps(value).encode())
        except BrokenPipeError:
            return

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        return


@pytest.fixture
def server() -> Iterator[JobsServer]:
    server = JobsServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(server: JobsServer) -> JobsClient:
    return client_of(server, timeout_seconds=60.0)


def client_of(server: JobsServer, timeout_seconds: float) -> JobsClient:
    return JobsClient(f"http://127.0.0.1:{server.server_port}", "secret", timeout_seconds)


def test_submission_can_be_found_with_its_exit_code(client: JobsClient, server: JobsServer) -> None:
    client.submit("exec driver", "spotune-1", {"spotune-attempt": "1"})
    job = client.find("spotune-1")
    assert job is not None
    assert (job.status, job.exit_code, job.has_ended) == ("FAILED", 20, True)
    assert job.metadata == {"spotune-attempt": "1"}
    assert client.list_jobs() == [job]
    assert client.logs("spotune-1") == "hello"
    assert server.tokens == {"Bearer secret"}


def test_unknown_submission_is_none(client: JobsClient) -> None:
    assert client.find("spotune-9") is None
    assert client.logs("spotune-9") == ""
    client.stop("spotune-9")


def test_submission_that_arrived_despite_a_timeout_is_not_repeated(server: JobsServer) -> None:
    server.answers_late, client = True, client_of(server, timeout_seconds=2.0)
    client.submit("exec driver", "spotune-1", {})
    client.submit("exec driver", "spotune-1", {})
    assert list(server.jobs) == ["spotune-1"]


def test_missing_response_is_a_jobs_unavailable_error() -> None:
    nobody = JobsClient("http://127.0.0.1:9", "secret", timeout_seconds=0.5)
    with pytest.raises(JobsUnavailableError, match="was not answered"):
        nobody.version()


def test_proxy_of_the_environment_is_not_used(client: JobsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert client.version() == "2.60.0"
