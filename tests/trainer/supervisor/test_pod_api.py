"""The HTTP API of a pod's supervisor: progress at any time, validated requests, and followed logs."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.logs.line_format import format_timestamp
from spotune_trainer.supervisor.control import ControlSignals, SupervisorState, SupervisorStatus
from spotune_trainer.supervisor.http_server import ProgressServer
from spotune_trainer.supervisor.pod_api import PodApi
from spotune_trainer.supervisor.preflight.result import CheckResult
from tests.trainer.support.pods import request
from tests.trainer.support.waiting import wait_until


class Served:
    """The HTTP API of a job whose supervisor does nothing by itself."""

    def __init__(self, root: Path) -> None:
        self.directory = JobDirectory(root)
        self.control = ControlSignals()
        self.status = SupervisorStatus(self.control)
        self.url = ""

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def progress(self) -> dict[str, Any]:
        code, text = request(f"{self.url}/progress")
        assert code == 200
        found: dict[str, Any] = json.loads(text)
        return found

    def log(self, *lines: str) -> None:
        with self.directory.driver_log(1).open("a") as log:
            log.writelines(f"{format_timestamp(time.time())} INFO {line}\n" for line in lines)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    served.directory.logs.mkdir()
    Ledger(served.directory).append("attempt-started", attempt=1)
    api = PodApi(served.directory, served.control, served.status)
    with ProgressServer(served.directory, lambda: None, "127.0.0.1", 0, api.get_routes, api.post_routes) as server:
        served.url = server.url
        yield served


# Progress


def test_progress_before_the_first_status_is_starting(served: Served) -> None:
    served.status.job = "0123"
    served.status.set(SupervisorState.PREFLIGHT, "no room")
    served.status.preflight.checks = (CheckResult("storage-space", "failed", "no room", 0.25),)
    check = {"name": "storage-space", "status": "failed", "message": "no room", "seconds": 0.25}
    progress = served.progress()
    assert progress.pop("supervisorSeconds") >= 0
    assert progress == {
        "phase": "Starting",
        "supervisor": {
            "job": "0123",
            "state": "preflight",
            "message": "no room",
            "preflight": {"passed": False, "checks": [check]},
        },
    }


def test_progress_is_the_status_its_age_and_the_supervisor(served: Served) -> None:
    files.write_json(served.directory.status, {"time": time.time() - 3, "phase": "Training", "step": 7})
    progress = served.progress()
    assert (progress["phase"], progress["step"]) == ("Training", 7)
    assert progress["ageSeconds"] >= 3
    assert progress["supervisor"]["state"] == "waiting"


def test_progress_is_that_of_workers_that_have_outlived_their_driver(served: Served) -> None:
    logs = served.directory.generation_logs(1)
    logs.root.mkdir()
    status = {"time": time.time(), "phase": "Starting", "generation": 1, "step": 7}
    files.write_json(served.directory.status, status)
    progress = {"phase": "Training", "step": 7, "heartbeatSeconds": 0.5}
    files.write_json(logs.progress, {**progress, "heartbeat": 1})
    assert served.progress()["phase"] == "Starting"
    files.write_json(logs.progress, {**progress, "heartbeat": 2, "step": 8})
    found = served.progress()
    assert (found["phase"], found["step"], found["adopting"]) == ("Training", 8, True)
    assert found["message"] == "the head is being replaced; the workers train on"
    served.directory.status.unlink()
    assert served.progress()["phase"] == "Starting"


def test_unreadable_status_is_answered_with_the_last_one(served: Served) -> None:
    served.directory.status.write_text("{")
    assert served.progress()["phase"] == "Starting"
    files.write_json(served.directory.status, {"time": time.time(), "phase": "Training", "step": 7, "message": None})
    served.progress()
    served.directory.status.unlink()
    served.directory.status.mkdir()
    progress = served.progress()
    assert (progress["phase"], progress["step"]) == ("Training", 7)
    assert progress["message"].startswith("the status cannot be read: ")
    assert request(f"{served.url}/metrics")[0] == 500
    served.directory.status.rmdir()
    assert served.progress()["phase"] == "Starting"


@pytest.mark.parametrize(
    ("state", "stopping", "stopped"),
    [
        (SupervisorState.RUNNING, "stopping", "running"),
        (SupervisorState.PREFLIGHT, "stopping", "preflight"),
        (SupervisorState.STOPPED, "stopped", "waiting"),
        (SupervisorState.FAILED, "failed", "failed"),
        (SupervisorState.TRAINED, "trained", "trained"),
    ],
)
def test_stop_and_start_show_at_once(served: Served, state: SupervisorState, stopping: str, stopped: str) -> None:
    served.status.set(state)
    for _ in range(2):
        assert json.loads(request(f"{served.url}/stop", "POST", b"")[1])["state"] == stopping
    assert served.control.grace_seconds == 60
    assert json.loads(request(f"{served.url}/start", "POST", b"")[1])["state"] == stopped
    assert served.control.grace_seconds is None


# Requests to stop and start


def test_stop_uses_the_given_grace_period(served: Served) -> None:
    code, text = request(f"{served.url}/stop", "POST", b'{"seconds": 12.5, "of a newer version": 1}')
    assert code == 200
    assert set(json.loads(text)) == {"job", "state", "message", "preflight"}
    assert served.control.grace_seconds == 12.5


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "the body is not JSON"),
        (b"[60]", 'send {"seconds": N}'),
        (b'{"seconds": "60"}', 'send {"seconds": N}'),
        (b'{"seconds": true}', 'send {"seconds": N}'),
        (b'{"seconds": 0}', 'send {"seconds": N}'),
        (b'{"seconds": 1e9}', 'send {"seconds": N}'),
        (b'{"seconds": NaN}', 'send {"seconds": N}'),
        (b"\xff", "the body is not JSON"),
    ],
)
def test_invalid_stop_request_is_refused_with_a_reason(served: Served, body: bytes, reason: str) -> None:
    code, text = request(f"{served.url}/stop", "POST", body)
    assert code == 400
    assert reason in json.loads(text)["message"]
    assert not served.control.stopping


def test_too_long_body_or_one_of_unknown_length_is_not_read(served: Served) -> None:
    for size in (4097, 100_000):
        assert request(f"{served.url}/stop", "POST", b" " * size)[0] == 413
    assert request(f"{served.url}/nothing", "POST", b" " * 100_000)[0] == 404
    connection = HTTPConnection(*served.address, timeout=60)
    connection.request("POST", "/stop", body=iter([b"{}"]), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert not served.control.stopping


def test_wrong_methods_and_paths_are_answered_with_the_right_ones(served: Served) -> None:
    assert request(f"{served.url}/stop") == (405, "/stop accepts only POST\n")
    assert request(f"{served.url}/logs", "POST", b"") == (405, "/logs accepts only GET\n")
    assert request(f"{served.url}/") == (
        404,
        "unknown path; available: /progress, /metrics, /healthz, /logs, POST /stop, POST /start\n",
    )


def test_one_connection_serves_many_requests(served: Served) -> None:
    connection = HTTPConnection(*served.address, timeout=60)
    for method, path in [("GET", "/healthz"), ("POST", "/stop"), ("GET", "/nothing"), ("GET", "/progress")]:
        connection.request(method, path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == (404 if path == "/nothing" else 200)
    connection.close()


# Logs


def test_logs_are_whole_or_the_last_lines(served: Served) -> None:
    served.log("one", "two", "three")
    code, text = request(f"{served.url}/logs")
    assert code == 200
    assert [line.split()[-1] for line in text.splitlines()] == ["one", "two", "three"]
    assert request(f"{served.url}/logs?lines=1")[1].split()[-1] == "three"
    assert len(request(f"{served.url}/logs?lines=2&follow=0")[1].splitlines()) == 2


@pytest.mark.parametrize("lines", ["-1", "many", "1e3", "100001"])
def test_wrong_number_of_lines_is_refused(served: Served, lines: str) -> None:
    code, text = request(f"{served.url}/logs?lines={lines}")
    assert code == 400
    assert f"lines={lines}: give a whole number" in json.loads(text)["message"]


def test_followed_logs_are_chunked_until_the_server_ends(served: Served) -> None:
    served.log("one", "two")
    connection = HTTPConnection(*served.address, timeout=60)
    connection.request("GET", "/logs?follow=1&lines=1")
    answer = connection.getresponse()
    assert answer.getheader("Transfer-Encoding") == "chunked"
    assert answer.readline().split()[-1] == b"two"
    served.log("three")
    assert answer.readline().split()[-1] == b"three"
    connection.close()


def test_stream_ends_when_its_client_disconnects(served: Served) -> None:
    served.log("one")
    others = set(threading.enumerate())

    def listeners() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in others and "request" in thread.name]

    with socket.create_connection(served.address, timeout=60) as client:
        client.sendall(b"GET /logs?follow=1 HTTP/1.0\r\n\r\n")
        answer = b""
        while not answer.endswith(b"one\n"):
            answer += client.recv(100)
        assert b"Transfer-Encoding" not in answer, "HTTP/1.0 knows no chunks"
        assert len(listeners()) == 1
    assert wait_until(lambda: not listeners(), 60)
