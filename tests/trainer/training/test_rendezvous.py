"""A rank does not try to join its group before rank 0 listens."""

from __future__ import annotations

import socket
import threading

import pytest

from spotune_trainer.training import worker


def test_rank_waits_until_rank_0_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listens = threading.Event()

        def listen() -> None:
            listens.set()
            listener.listen()

        threading.Timer(0.2, listen).start()
        worker.wait_for_rendezvous(*listener.getsockname())
        assert listens.is_set()


def test_rank_gives_up_a_rank_0_that_never_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_RENDEZVOUS_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        worker.wait_for_rendezvous(*silent.getsockname())
