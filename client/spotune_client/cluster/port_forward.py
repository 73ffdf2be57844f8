"""Forwards a local port to a port of a pod, through the API server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from spotune.errors import SpotuneError, UsageError
from spotune_client.cluster.client import Cluster
from spotune_client.cluster.pod_stream import PodConnection

_CHUNK_BYTES = 2**16


@contextmanager
def port_forward(
    cluster: Cluster, pod: str, port: int, local_port: int, notify: Callable[[str], None]
) -> Iterator[int]:
    """Forward connections for the duration of the block, and yield the local port (loopback interface only).

    Args:
        cluster: The cluster with the pod.
        pod: Name of the pod.
        port: Port of the pod.
        local_port: Local port; 0: any free port.
        notify: Prints a message when a connection fails.

    Raises:
        UsageError: The local port is in use.
    """
    try:
        listener = socket.create_server(("127.0.0.1", local_port))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"--port {local_port}: {reason}; use another port, or 0 for any free one") from error
    with listener:
        threading.Thread(target=_accept, args=(listener, cluster, pod, port, notify), daemon=True).start()
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, cluster: Cluster, pod: str, port: int, notify: Callable[[str], None]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # it was closed
            return
        threading.Thread(target=_serve, args=(client, cluster, pod, port, notify), daemon=True).start()


def _serve(client: socket.socket, cluster: Cluster, pod: str, port: int, notify: Callable[[str], None]) -> None:
    """Copy bytes in both directions until either side closes."""
    with client:
        try:
            connection = cluster.connect(pod, port)
        except SpotuneError as error:
            notify(str(error))
            return
        with connection:
            upload = threading.Thread(target=_upload, args=(client, connection), daemon=True)
            upload.start()
            with suppress(OSError, SpotuneError):
                while data := connection.read(_CHUNK_BYTES):
                    client.sendall(data)
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            upload.join()


def _upload(client: socket.socket, connection: PodConnection) -> None:
    with suppress(OSError):
        while data := client.recv(_CHUNK_BYTES):
            connection.sendall(data)
    connection.abort()
