"""A node with a throttled connection is found by real pulls over TCP, through a proxy that throttles."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory
from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress
from spotune_trainer.checkpoint.memory.peer_copies import PeerCopies
from spotune_trainer.checkpoint.memory.peer_server import PeerServer
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.fitness import node_fitness
from spotune_trainer.worker_group.fitness.links import pull_rate
from spotune_trainer.worker_group.fitness.measurements import NodeMeasurement, NodeRecord
from spotune_trainer.worker_group.fitness.node_fitness import NodeFitness
from spotune_trainer.worker_group.fitness.verdict import unfit_nodes
from spotune_trainer.worker_group.node_state import NodeInfo

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
    fast, slow = (pull_rate(each, SECRET) or 0.0 for each in (server.address, throttled(server.address)))
    assert 0 < slow < 2 * THROTTLED
    assert fast > 4 * slow
    a, b, c = (f"{name} boot" for name in "abc")
    records = recorded({}, {a: fast}, {a: slow, b: slow})
    assert list(unfit_nodes(records)) == [c]
    assert unfit_nodes(records)[c].startswith("its network carries ")
    records = recorded({}, {a: slow}, {a: slow, b: fast})
    assert list(unfit_nodes(records)) == [a], "the first node, which has pulled nothing itself"
    assert unfit_nodes(records[:2]) == {}, "of two, nobody can say which one is at fault"


def test_node_that_serves_an_earlier_driver_tells_nothing_of_the_network(server: PeerServer) -> None:
    assert pull_rate(server.address, b"of a later driver") is None
    server.close()
    assert pull_rate(server.address, SECRET) == 0.0, "nobody listens there"


@pytest.mark.parametrize(("rate", "unfit"), [(None, []), (0.0, ["d"]), (9e8, [])])
def test_new_node_is_not_unfit_since_the_others_train_on_for_an_earlier_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float | None, unfit: list[str]
) -> None:
    """After the loss of a head: nodes a, b and c were checked by the driver before."""
    answered = SimpleNamespace(wait=lambda references, **_: (references, []), get=lambda reference: reference)
    monkeypatch.setattr(node_fitness, "ray", answered)
    directory = JobDirectory(tmp_path)
    files.write_json(directory.job, {"spec": {"workers": {"nodeCheck": "always"}}})
    for record in recorded({}, {"a boot": 1e9}, {"a boot": 1e9, "b boot": 1e9}):
        Ledger(directory).append("node-checked", **record.as_json())
    fitness = NodeFitness(directory)

    def call(method: str, argument: Any) -> Any:
        return NodeMeasurement() if method == "measure" else [rate] * len(argument)

    for number, name in enumerate("abcd"):
        peer = PeerAddress(f"10.0.0.{number}", 4000)
        fitness.begin(name, call, NodeInfo(peer.host, 1 << 30, peer, name, "boot"), gpus=True)
    for _ in ("devices", "links"):
        fitness.advance()
    assert [each["node"] for each in fitness.unfit_nodes()] == unfit
    assert fitness.is_ready("d") != bool(unfit)
