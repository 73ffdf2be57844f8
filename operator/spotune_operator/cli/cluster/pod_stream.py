"""A connection to a port of a pod: bytes over the WebSocket by which the API server forwards ports.

The client library has one of its own, which closes the local side as soon as the WebSocket ends, whether or not all
that had arrived was read by then. Servers that end a connection after their answer, as the supervisor does, lose the
end of it that way. Protocol: ``v4.channel.k8s.io``; the first byte of a frame is its channel, 0 for data and 1 for
errors, and the first frame of each channel holds the port's number.
"""

from __future__ import annotations

import http.client
import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode

from kubernetes.stream.ws_client import create_websocket
from websocket import (
    ABNF,
    WebSocket,
    WebSocketBadStatusException,
    WebSocketConnectionClosedException,
    WebSocketException,
    WebSocketTimeoutException,
)

from spotune_operator.cli.cluster.api_errors import refusal, unreachable
from spotune_operator.errors import KubernetesError

_PROTOCOL: Final = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1
_PORT_BYTES = 2
_IDLE_SECONDS: Final = 5.0


def open_connection(configuration: Any, url: str, port: int, headers: Mapping[str, str]) -> PodConnection:
    """Ask the API server for a connection.

    Args:
        configuration: The client library's, with certificates and proxies.
        url: Of the pod's subresource ``portforward``, with https or http.
        port: Of the pod.
        headers: With the user's authorization.

    Raises:
        KubernetesError: It is refused, or nobody answers.
    """
    server = configuration.host
    address = f"ws{url.removeprefix('http')}?{urlencode({'ports': port})}"
    try:
        websocket = create_websocket(configuration, address, {**headers, "sec-websocket-protocol": _PROTOCOL})
    except WebSocketBadStatusException as error:
        raise refusal(error.status_code, (error.resp_body or b"").decode(errors="replace"), server) from error
    except (WebSocketException, OSError) as error:
        raise unreachable(server, error) from error
    return PodConnection(websocket, port)


class PodConnection(io.RawIOBase):
    """Bytes to and from a port of a pod; one thread may read while another one writes.

    Args:
        websocket: As the API server has accepted it.
        port: Of the pod, for messages.
    """

    def __init__(self, websocket: WebSocket, port: int) -> None:
        self._websocket = websocket
        self._port = port
        self._greeted: set[int] = set()
        self._unread = b""
        self._idle: Callable[[], None] = lambda: None

    def when_idle(self, idle: Callable[[], None]) -> None:
        """Have ``idle`` called every few seconds while there is nothing to read; what it raises ends the reading.

        A pod on a node that has crashed says no goodbye: somebody has to look.
        """
        self._idle = idle
        self._websocket.settimeout(_IDLE_SECONDS)

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes; 0 at the end.

        Raises:
            KubernetesError: The pod does not listen on the port.
        """
        if not self._unread:
            self._unread = self._next()
        count = min(len(buffer), len(self._unread))
        buffer[:count], self._unread = self._unread[:count], self._unread[count:]
        return count

    def sendall(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            ConnectionResetError: The connection has ended.
        """
        try:
            self._websocket.send_binary(bytes([_DATA]) + bytes(data))
        except (WebSocketException, OSError) as error:
            raise ConnectionResetError(str(error)) from error

    def abort(self) -> None:
        """Have a thread that waits for bytes see the end of them."""
        with suppress(OSError):
            self._websocket.abort()

    def close(self) -> None:
        """End the connection."""
        if not self.closed:
            self._websocket.shutdown()
        super().close()

    def _next(self) -> bytes:
        """The next bytes of data; empty at the end."""
        while True:
            try:
                opcode, frame = self._websocket.recv_data_frame(control_frame=True)
            except WebSocketTimeoutException:
                self._idle()
                self._ping()
                continue
            except (WebSocketConnectionClosedException, OSError):
                return b""
            if opcode == ABNF.OPCODE_CLOSE:
                return b""
            if opcode == ABNF.OPCODE_BINARY and frame.data and (data := self._take(frame.data[0], frame.data[1:])):
                return data

    def _ping(self) -> None:
        """Show whatever stands in between that the connection is in use; if it is not any more, the next look tells."""
        with suppress(WebSocketException, OSError):
            self._websocket.ping()

    def _take(self, channel: int, content: bytes) -> bytes:
        if channel not in self._greeted:
            self._greeted.add(channel)
            content = content[_PORT_BYTES:]
        if channel == _ERROR and content:
            said = " ".join(content.decode(errors="replace").split())
            raise KubernetesError(f"nothing of the pod answers on port {self._port}: {said}")
        return content if channel == _DATA else b""


class HttpOverPod(http.client.HTTPConnection):
    """HTTP to a port of a pod; a context manager.

    Args:
        connection: To that port.
    """

    def __init__(self, connection: PodConnection) -> None:
        super().__init__("127.0.0.1")
        self._connection = connection
        self.sock: Any = _Socket(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


class _Socket:
    """All that ``http.client`` wants of a socket."""

    def __init__(self, connection: PodConnection) -> None:
        self._connection = connection

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self._connection)

    def sendall(self, data: bytes) -> None:
        self._connection.sendall(data)

    def close(self) -> None:
        """Nothing: the answer may still have to be read."""
