"""The end of requests over TLS, against a server that does not close its side."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import ssl
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import kopf

from spotune_operator.kube.client import PODS, Kube
from spotune_testcluster.pki import Authority
from tests.operator.support.event_loop import run

_EVENT = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "a"}}}).encode() + b"\n"


@contextmanager
def tls_server_that_never_closes(folder: Path) -> Iterator[kopf.ConnectionInfo]:
    """An API server that sends one event of a watch, and reads nothing more, not even the end of the connection."""
    authority = Authority(folder)
    authority.issue("server", "server", addresses=["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    ended = threading.Event()

    def serve() -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + _EVENT)
            ended.wait(20)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            url = f"https://127.0.0.1:{listener.getsockname()[1]}"
            yield kopf.ConnectionInfo(server=url, ca_path=str(authority.certificate))
        finally:
            ended.set()
            thread.join()


def test_connection_of_a_watch_that_is_left_closes_without_the_server(tmp_path: Path) -> None:
    async def test(connection: kopf.ConnectionInfo) -> None:
        async with Kube(lambda: connection) as kube:
            events = kube.watch(PODS, "", "", "7", 300)
            assert await anext(events) == ("ADDED", {"metadata": {"name": "a"}})
            await events.aclose()

    assert warnings_after(lambda connection: asyncio.run(asyncio.wait_for(test(connection), 30)), tmp_path) == []


class Client(asyncio.Protocol):
    """Waits for the begin of a response."""

    def __init__(self) -> None:
        self.has_response = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.has_response.set()


def test_connection_that_is_left_open_ends_with_the_event_loop_of_a_test(tmp_path: Path) -> None:
    async def test(connection: kopf.ConnectionInfo) -> None:
        address = urlsplit(connection.server)
        loop, context = asyncio.get_running_loop(), connection.as_ssl_context()
        host, port = str(address.hostname), address.port or 443
        transport, client = await loop.create_connection(Client, host, port, ssl=context)
        transport.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(client.has_response.wait(), 20)

    assert warnings_after(lambda connection: run(test(connection)), tmp_path) == []
    found = warnings_after(lambda connection: asyncio.run(test(connection)), tmp_path)
    assert any("unclosed" in message for message in found), "asyncio.run alone would do"


def warnings_after(test: Callable[[kopf.ConnectionInfo], None], tmp_path: Path) -> list[str]:
    """The warnings of a test: each transport that is still open when the event loop ends warns of itself."""
    with tls_server_that_never_closes(tmp_path) as connection, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()  # what earlier tests have left warns now
        found.clear()
        test(connection)
        gc.collect()
    return [str(warning.message) for warning in found]
