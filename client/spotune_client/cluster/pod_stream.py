"""A byte stream to a port of a pod, over the API server's port-forward WebSocket.

The client library's own port-forward closes the local side as soon as the WebSocket ends, even if received bytes are
still unread. With servers that close the connection after their response, as the supervisor does, the end of the
response is lost. Protocol: ``v4.channel.k8s.io``. The first byte of a frame is its channel (0 data, 1 errors), and the
first frame of each channel contains the port number.
"""

from __future__ import annotations

import http.client
import io
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode

from kubernetes.stream.ws_client import websocket_proxycare
from websocket import (
    ABNF,
    WebSocket,
    WebSocketBadStatusException,
    WebSocketException,
    WebSocketTimeoutException,
)

from spotune.errors import KubernetesError
from spotune_client.cluster.api_errors import error_from_response, unreachable_error

_PROTOCOL: Final = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1
_PORT_BYTES = 2
_PINGS: Final = 12
"""Pings without an answer after which a connection counts as lost."""


def open_connection(
    configuration: Any, url: str, port: int, headers: Mapping[str, str], quiet_seconds: float
) -> PodConnection:
    """Open a port-forward connection.

    Args:
        configuration: Configuration of the client library, with certificates and proxies.
        url: URL of the pod's ``portforward`` subresource, with https or http.
        port: Port of the pod.
        headers: Request headers with the user's authorization.
        quiet_seconds: Time without a byte after which the connection counts as lost.

    Raises:
        KubernetesError: The API server rejects the request or does not answer.
    """
    server = configuration.host
    address = f"ws{url.removeprefix('http')}?{urlencode({'ports': port})}"
    try:
        websocket = _open_websocket(configuration, address, headers, quiet_seconds)
    except WebSocketBadStatusException as error:
        content, headers = (error.resp_body or b"").decode(errors="replace"), error.resp_headers or {}
        raise error_from_response(error.status_code, content, server, headers.get("retry-after", "")) from error
    except (WebSocketException, OSError) as error:
        raise unreachable_error(server, error) from error
    return PodConnection(websocket, port, quiet_seconds)


def _open_websocket(configuration: Any, url: str, headers: Mapping[str, str], seconds: float) -> WebSocket:
    """Connect as the client library's ``create_websocket`` does, but with a time-out."""
    tls: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE}
    if configuration.verify_ssl:
        tls = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": configuration.ssl_ca_cert}
        if configuration.assert_hostname is not None:
            tls["check_hostname"] = configuration.assert_hostname
    if configuration.cert_file:
        tls["certfile"] = configuration.cert_file
    if configuration.key_file:
        tls["keyfile"] = configuration.key_file
    if configuration.tls_server_name:
        tls["server_hostname"] = configuration.tls_server_name
    header = [f"{name}: {value}" for name, value in {**headers, "sec-websocket-protocol": _PROTOCOL}.items()]
    options = websocket_proxycare({"header": header, "timeout": seconds}, configuration, url, headers)
    websocket = WebSocket(sslopt=tls)
    websocket.connect(url, **options)
    return websocket


class PodConnection(io.RawIOBase):
    """A byte stream to and from a port of a pod. One thread may read while another writes.

    Args:
        websocket: The connected WebSocket.
        port: Port of the pod, for messages.
        quiet_seconds: Time without a byte, also without an answer to a ping, after which the connection is lost.
    """

    def __init__(self, websocket: WebSocket, port: int, quiet_seconds: float) -> None:
        self._websocket = websocket
        self._websocket.settimeout(quiet_seconds / _PINGS)
        self._quiet_seconds = quiet_seconds
        self._unanswered_pings = 0
        self._port = port
        self._opened_channels: set[int] = set()
        self._unread = b""
        self._idle: Callable[[], None] = lambda: None

    def call_when_idle(self, idle: Callable[[], None]) -> None:
        """Call ``idle`` every few seconds while there is nothing to read. An exception from it ends the read.

        If the pod's node crashes, the connection is never closed, so the reader has to check.
        """
        self._idle = idle

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes and return their number; 0 at the end of the stream.

        Raises:
            KubernetesError: The pod does not listen on the port.
            TimeoutError: The connection is lost.
        """
        if not self._unread:
            self._unread = self._next()
        count = min(len(buffer), len(self._unread))
        buffer[:count], self._unread = self._unread[:count], self._unread[count:]
        return count

    def sendall(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            ConnectionResetError: The connection is closed.
        """
        try:
            self._websocket.send_binary(bytes([_DATA]) + bytes(data))
        except (WebSocketException, OSError) as error:
            raise ConnectionResetError(str(error)) from error

    def abort(self) -> None:
        """End the stream for a thread that is waiting in a read."""
        with suppress(OSError):
            self._websocket.abort()

    def close(self) -> None:
        """Close the connection."""
        if not self.closed:
            self._websocket.shutdown()
        super().close()

    def _next(self) -> bytes:
        """The next bytes of data; empty at the end of the stream."""
        while True:
            try:
                opcode, frame = self._websocket.recv_data_frame(control_frame=True)
            except WebSocketTimeoutException as error:
                self._idle()
                self._ping(error)
                continue
            except (WebSocketException, OSError):
                return b""
            self._unanswered_pings = 0
            if opcode == ABNF.OPCODE_CLOSE:
                return b""
            if opcode == ABNF.OPCODE_BINARY and frame.data and (data := self._payload(frame.data[0], frame.data[1:])):
                return data

    def _ping(self, waited: Exception) -> None:
        """Keep the connection alive through proxies, and find out whether the pod's node still answers."""
        if self._unanswered_pings == _PINGS:
            raise TimeoutError(f"no answer for {self._quiet_seconds:.0f} s") from waited
        self._unanswered_pings += 1
        with suppress(WebSocketException, OSError):
            self._websocket.ping()

    def _payload(self, channel: int, content: bytes) -> bytes:
        if channel not in self._opened_channels:
            self._opened_channels.add(channel)
            content = content[_PORT_BYTES:]
        if channel == _ERROR and content:
            message = " ".join(content.decode(errors="replace").split())
            raise KubernetesError(f"the pod does not listen on port {self._port}: {message}")
        return content if channel == _DATA else b""


class PodHttpConnection(http.client.HTTPConnection):
    """HTTP to a port of a pod; a context manager.

    Args:
        connection: Stream to that port.
    """

    def __init__(self, connection: PodConnection) -> None:
        super().__init__("127.0.0.1")
        self._connection = connection
        self.sock: Any = _SocketAdapter(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


class _SocketAdapter:
    """The socket methods that ``http.client`` uses."""

    def __init__(self, connection: PodConnection) -> None:
        self._connection = connection

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self._connection)

    def sendall(self, data: bytes) -> None:
        self._connection.sendall(data)

    def close(self) -> None:
        """Do nothing: the response may not have been read yet."""
