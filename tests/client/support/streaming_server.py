"""A real HTTP server in a thread that streams logs and forwarded ports, and can go silent without closing."""

from __future__ import annotations

import base64
import hashlib
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from spotune_client.cluster.client import Cluster
from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
from tests.client.cluster.test_kubeconfig import kubeconfig

QUIET_SECONDS: Final = 0.6
"""Time without a byte after which the client counts a stream as lost."""
_HANDSHAKE_SUFFIX: Final = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_PING_BYTES: Final = 6
_PORT: Final = b"\x9a\x1f"
_PONG: Final = b"\x8a\x00"


@dataclass(frozen=True)
class Stream:
    """What the server sends on a connection.

    Attributes:
        text: The first text.
        pongs: Number of pings that it answers after that, on a forwarded port.
        rest: The text after the pongs.
        end: What it does then: close in order, close in the middle, send what is no frame, or stay silent without
            closing. With ``refuse`` it does not even answer the request.
    """

    text: str = ""
    pongs: int = 0
    rest: str = ""
    end: Literal["close", "cut", "garbage", "silence", "refuse"] = "close"


Streams = Callable[[str, dict[str, str]], Stream | str]
"""A stream, or the body of an ordinary response, by path and query of a request."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Streams
    ended: threading.Event

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        url = urlsplit(self.path)
        found = type(self).answer(url.path, dict(parse_qsl(url.query)))
        if isinstance(found, str):
            self.send_response(200)
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found.encode())
            return
        self.close_connection = True
        if found.end != "refuse":
            (self._forward if url.path.endswith("/portforward") else self._log)(found)
        if found.end in ("silence", "refuse"):
            self.ended.wait()

    def do_POST(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.do_GET()

    def _log(self, stream: Stream) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if stream.text:
            self.wfile.write(f"{len(stream.text):x}\r\n{stream.text}\r\n".encode())
        if stream.end == "close":
            self.wfile.write(b"0\r\n\r\n")

    def _forward(self, stream: Stream) -> None:
        key = f"{self.headers['Sec-WebSocket-Key']}{_HANDSHAKE_SUFFIX}".encode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
        self.end_headers()
        for channel in (b"\x00", b"\x01"):
            self.wfile.write(_frame(channel + _PORT))
        self.wfile.write(_frame(b"\x00" + stream.text.encode()))
        for _ in range(stream.pongs):
            self.rfile.read(_PING_BYTES)
            self.wfile.write(_PONG)
        if stream.rest:
            self.wfile.write(_frame(b"\x00" + stream.rest.encode()))
        if stream.end == "garbage":
            self.wfile.write(b"\xff" * 20)

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


@contextmanager
def streaming_cluster(answer: Streams, folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[Cluster]:
    """A client in namespace `team` of a server that answers like this.

    Args:
        answer: Returns what the server sends.
        folder: Folder for the kubeconfig; with TLS, `ca.crt`, `client.crt` and `client.key` are there.
        tls: The server's side of TLS; None: HTTP.
    """
    ended = threading.Event()
    handler = type("Handler", (_Handler,), {"answer": staticmethod(answer), "ended": ended})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        url, user, cluster = f"http://127.0.0.1:{http.server_port}", None, "insecure-skip-tls-verify: true"
        if tls is not None:
            http.socket = tls.wrap_socket(http.socket, server_side=True)
            url, cluster = url.replace("http:", "https:"), f"certificate-authority: {folder / 'ca.crt'}"
            user = {"client-certificate": str(folder / "client.crt"), "client-key": str(folder / "client.key")}
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        file = kubeconfig(folder, user, test="team")
        text = file.read_text().replace("https://127.0.0.1:1", url)
        file.write_text(text.replace("insecure-skip-tls-verify: true", cluster))
        try:
            yield open_cluster(ClusterOptions(kubeconfig=file), QUIET_SECONDS)
        finally:
            ended.set()
            http.shutdown()
            thread.join()


def _frame(content: bytes) -> bytes:
    """A binary WebSocket frame of a server."""
    return (
        b"\x82" + (bytes([len(content)]) if len(content) < 126 else b"\x7e" + struct.pack("!H", len(content))) + content
    )
