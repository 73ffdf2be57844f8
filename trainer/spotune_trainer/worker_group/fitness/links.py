"""How fast a node gets bytes from another one: a pull over TCP from the agent there, for a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from spotune_trainer.checkpoint.memory.peer_connection import (
    CHUNK_BYTES,
    OtherSecretError,
    PeerAddress,
    PeerConnection,
    PeerError,
)

PULL_SECONDS: Final = 0.25
_CONNECT_SECONDS: Final = 5.0


def pull_rate(peer: PeerAddress, secret: bytes, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Bytes per second that arrive from the agent of another node; 0 if it cannot be reached.

    None if it has another secret, as while ranks of an earlier driver train there: that says nothing of the network.
    """
    try:
        with PeerConnection.open(peer, secret, _CONNECT_SECONDS) as connection:
            connection.send({"request": "pull"})
            connection.receive()
            received, started = 0, clock()
            while received == 0 or clock() - started < PULL_SECONDS:
                received += len(connection.receive_bytes(CHUNK_BYTES))
            return received / (clock() - started)
    except OtherSecretError:
        return None
    except PeerError:
        return 0.0
