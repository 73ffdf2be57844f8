"""Requests and files that crashed a handler of the supervisor's server, found by fuzzing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotune_trainer.supervisor.http_server import is_number_up_to, metrics_lines
from tests.fuzz.targets.servers import read_request, read_status_over_http

DIGITS = b"9" * 5000


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /stop HTTP/1.1\r\nContent-Length: " + DIGITS + b"\r\n\r\n",
        b"GET /logs?lines=" + DIGITS + b" HTTP/1.0\r\n\r\n",
        b"POST /stop HTTP/1.1\r\nContent-Length: 4000\r\nConnection: close\r\n\r\n" + b"[" * 4000,
    ],
    ids=["length", "lines", "body"],
)
def test_request_gets_an_answer_of_a_client_error(request_bytes: bytes) -> None:
    read_request(request_bytes)


@pytest.mark.parametrize(
    "status", [b"{", b"\x80", b"{}", b'{"time": "x"}', b'{"time": 1, "step": "x", "workers": [3]}']
)
def test_damaged_status_does_not_break_the_server(status: bytes) -> None:
    read_status_over_http(status)


@pytest.mark.parametrize(
    ("text", "is_one"), [("12", True), ("13", False), ("1" * 5000, False), ("-1", False), ("", False)]
)
def test_numbers_are_compared_before_they_are_converted(text: str, is_one: bool) -> None:
    assert is_number_up_to(text, 12) == is_one


def test_names_in_a_status_cannot_add_metrics(tmp_path: Path) -> None:
    """Whoever writes status.json is not whoever reads Prometheus."""
    status = json.loads(json.dumps({"restarts": {'x"} 1\nspotune_loss 0 #': 3}, "phase": "a\\"}))
    lines = list(metrics_lines(status))
    assert r'spotune_restarts_total{cause="x\"} 1\nspotune_loss 0 #"} 3' in lines
    assert r'spotune_phase{phase="a\\"} 1' in lines
    assert not any("\n" in line for line in lines)
