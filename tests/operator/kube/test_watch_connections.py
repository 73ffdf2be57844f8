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
from dataclasses import dataclass
from pathlib import Path

import kopf
import pytest

from spotune_operator.kube.client import JOBS, PODS, Kube
from spotune_testcluster.pki import Authority
from tests.operator.support.event_loop import run

_EVENT = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "a"}}}).encode() + b"\n"


@dataclass(frozen=True)
class Server:
    """How to reach a server, and whether it has begun to respond."""

    connection: kopf.ConnectionInfo
    has_responded: threading.Event


@contextmanager
def tls_server_that_never_closes(folder: Path) -> Iterator[Server]:
    """An API server that sends one event of a watch, and reads nothing more, not even the end of the connection."""
    authority = Authority(folder)
    authority.issue("server", "server", addresses=["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    has_responded, ended = threading.Event(), threading.Event()

    def serve() -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + _EVENT)
            has_responded.set()
            ended.wait(20)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            url = f"https://127.0.0.1:{listener.getsockname()[1]}"
            yield Server(kopf.ConnectionInfo(server=url, ca_path=str(authority.certificate)), has_responded)
        finally:
            ended.set()
            thread.join()


def test_connection_of_a_watch_that_is_left_closes_without_the_server(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        async with Kube(lambda: server.connection) as kube:
            events = kube.watch(PODS, "", "", "7", 300)
            assert await anext(events) == ("ADDED", {"metadata": {"name": "a"}})
            await events.aclose()

    assert warnings_after(lambda server: asyncio.run(asyncio.wait_for(test(server), 30)), tmp_path) == []


def test_connection_of_a_cancelled_request_ends_with_the_event_loop_of_a_test(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        async with Kube(lambda: server.connection) as kube:
            request = asyncio.create_task(kube.find(JOBS, "default", "a"))
            assert await asyncio.to_thread(server.has_responded.wait, 20)
            request.cancel()  # the rest of the response would never come
            with pytest.raises(asyncio.CancelledError):
                await request

    assert warnings_after(lambda server: run(test(server)), tmp_path) == []
    found = warnings_after(lambda server: asyncio.run(test(server)), tmp_path)
    assert any("unclosed" in message for message in found), "asyncio.run alone would do"


def warnings_after(test: Callable[[Server], None], tmp_path: Path) -> list[str]:
    """The warnings of a test: each transport that is still open when the event loop ends warns of itself."""
    with tls_server_that_never_closes(tmp_path) as server, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        test(server)
        gc.collect()
    return [str(warning.message) for warning in found]
