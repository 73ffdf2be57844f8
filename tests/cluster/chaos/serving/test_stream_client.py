"""The clients send refused requests again, report broken streams, and end when they are told to."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.cluster.chaos.serving import stream_client
from tests.cluster.chaos.serving.stream_client import Answer

REFUSED, BROKEN = 1, 2
"""Prompts whose first request is refused, and whose stream ends without its last part."""


class Gateway(BaseHTTPRequestHandler):
    """Answers with three chunks, the last of them with the usage."""

    seen: ClassVar[Counter[int]] = Counter()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = body["seed"]
        self.seen[number] += 1
        if number == REFUSED and self.seen[number] == 1:
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text in (f"{number}", f" {number + 1}"):
            self._send({"choices": [{"text": text, "index": 0}]})
        if number != BROKEN:
            self._send({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 1, "total_tokens": 3}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, chunk: dict[str, object]) -> None:
        chunk |= {"id": "1", "object": "text_completion", "created": 1, "model": "counting"}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Gateway.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def lines(url: str, *options: str) -> list[dict[str, object]]:
    """What the program prints until it is done."""
    command = [sys.executable, stream_client.__file__, f"--url={url}", "--model=counting", "--clients=2", "--prompts=4"]
    found: list[dict[str, object]] = []
    with subprocess.Popen(
        [*command, "--tokens=2", "--retry-seconds=30", *options], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(json.loads(line))
            if "done" in found[-1]:
                break
        process.kill()
    return found


def test_refused_request_is_sent_again_and_a_broken_stream_is_an_error(url: str, tmp_path: Path) -> None:
    *found, done = lines(url, "--rounds=1", f"--stop={tmp_path / 'stop'}")
    answers = {line["number"]: Answer(**line) for line in found}  # type: ignore[arg-type]
    assert "done" in done
    assert [answers[number].text for number in range(4)] == ["0 1", "1 2", "2 3", "3 4"]
    assert [answers[number].refused for number in range(4)] == [0, 1, 0, 0]
    assert {number for number, answer in answers.items() if answer.error} == {BROKEN}
    assert all(answer.heard for answer in answers.values())


def test_clients_end_once_the_file_is_there(url: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    stop.touch()
    found = lines(url, "--rounds=0", f"--stop={stop}")
    assert len(found) == 2 + 1
