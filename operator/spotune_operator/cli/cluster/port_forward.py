"""A port of this machine that leads to a port of a pod, through the API server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from spotune.errors import SpotuneError, UsageError
from spotune_operator.cli.cluster.client import Cluster
from spotune_operator.cli.cluster.pod_stream import PodConnection

_CHUNK_BYTES = 2**16


@contextmanager
def forwarded(cluster: Cluster, pod: str, port: int, local_port: int, say: Callable[[str], None]) -> Iterator[int]:
    """Forward connections for as long as the block lasts; the port of this machine, on the loopback interface alone.

    Args:
        cluster: Where the pod is.
        pod: Its name.
        port: Of the pod.
        local_port: Of this machine; 0 for any free one.
        say: Tells a person of a connection that could not be made.

    Raises:
        UsageError: Something else listens on the port.
    """
    try:
        listener = socket.create_server(("127.0.0.1", local_port))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"--port {local_port}: {why}; give another one, or 0 for any that is free") from error
    with listener:
        threading.Thread(target=_accept, args=(listener, cluster, pod, port, say), daemon=True).start()
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, cluster: Cluster, pod: str, port: int, say: Callable[[str], None]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # it was closed
            return
        threading.Thread(target=_serve, args=(client, cluster, pod, port, say), daemon=True).start()


def _serve(client: socket.socket, cluster: Cluster, pod: str, port: int, say: Callable[[str], None]) -> None:
    """Carry bytes both ways until either side has ended."""
    with client:
        try:
            connection = cluster.connect(pod, port)
        except SpotuneError as error:
            say(str(error))
            return
        with connection:
            upwards = threading.Thread(target=_copy_up, args=(client, connection), daemon=True)
            upwards.start()
            with suppress(OSError, SpotuneError):
                while data := connection.read(_CHUNK_BYTES):
                    client.sendall(data)
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            upwards.join()


def _copy_up(client: socket.socket, connection: PodConnection) -> None:
    with suppress(OSError):
        while data := client.recv(_CHUNK_BYTES):
            connection.sendall(data)
    connection.abort()
