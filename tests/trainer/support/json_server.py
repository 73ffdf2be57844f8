"""A local HTTP server that responds with JSON; the base of the fake servers in tests."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Reads request bodies and responds with JSON."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Do not log requests."""

    def body(self) -> bytes:
        """The request body, joined from its chunks and decompressed."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            return self._chunks()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def reply(self, value: Any, status: int = 200) -> None:
        """Respond with a JSON value."""
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore errors: clients end by resetting their connections."""


@contextmanager
def served(handler: type[JsonHandler]) -> Iterator[str]:
    """Run the server in a thread; yields its URL."""
    with _QuietServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
