"""A node with a throttled connection is found by real pulls over TCP, through a proxy that throttles."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from spotune_trainer.checkpoint.memory.node_memory import NodeMemory
from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress
from spotune_trainer.checkpoint.memory.peer_copies import PeerCopies
from spotune_trainer.checkpoint.memory.peer_server import PeerServer
from spotune_trainer.worker_group.fitness.links import pull_rate
from spotune_trainer.worker_group.fitness.measurements import NodeMeasurement, NodeRecord
from spotune_trainer.worker_group.fitness.verdict import unfit_nodes

SECRET = b"secret"
THROTTLED = 2e6
"""Bytes per second: so few that also a busy machine passes on many times as many without the proxy."""


@pytest.fixture
def server() -> Iterator[PeerServer]:
    started = PeerServer("127.0.0.1", SECRET, NodeMemory(), PeerCopies())
    yield started
    started.close()


def throttled(target: PeerAddress) -> PeerAddress:
    """A proxy to a server that passes few bytes per second on to its client."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listener.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # little waits for a client that was held up
        with listener, client, socket.create_connection((target.host, target.port)) as upstream, suppress(OSError):
            threading.Thread(target=copy, args=(client, upstream, float("inf")), daemon=True).start()
            copy(upstream, client, THROTTLED)

    threading.Thread(target=serve, daemon=True).start()
    return PeerAddress("127.0.0.1", listener.getsockname()[1])


def copy(source: socket.socket, sink: socket.socket, rate: float) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            sink.sendall(content)
            time.sleep(len(content) / rate)


def recorded(*links: dict[str, float]) -> list[NodeRecord]:
    """Nodes a, b, c, each with what it got from the others."""
    return [NodeRecord(name, "boot", NodeMeasurement(), rates) for name, rates in zip("abc", links, strict=True)]


def test_pull_measures_the_connection(server: PeerServer) -> None:
    fast, slow = pull_rate(server.address, SECRET), pull_rate(throttled(server.address), SECRET)
    assert 0 < slow < 2 * THROTTLED
    assert fast > 4 * slow
    assert pull_rate(server.address, b"another") == 0.0
    a, b, c = (f"{name} boot" for name in "abc")
    records = recorded({}, {a: fast}, {a: slow, b: slow})
    assert list(unfit_nodes(records)) == [c]
    assert unfit_nodes(records)[c].startswith("its network carries ")
    records = recorded({}, {a: slow}, {a: slow, b: fast})
    assert list(unfit_nodes(records)) == [a], "the first node, which has pulled nothing itself"
    assert unfit_nodes(records[:2]) == {}, "of two, nobody can say which one is at fault"
