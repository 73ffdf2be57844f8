"""The process that owns the weights which the replicas of one GPU share, see `shared.py`.

Usage:
    python -m spotune_serve.engine.weights.holder OPTIONS

OPTIONS is JSON. The process detaches itself: it outlives the replica that started it, also where Ray ends the child
processes of a replica. It loads the model, writes `ready` or an error into a pipe, and sends each process that
connects what it needs to map the weights. It ends when no replica has been connected for a while.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

_MAX_WAITING = 128
"""Replicas that may wait for an answer at once."""


def main() -> None:
    """Detach, load, serve."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    if os.fork():  # torch is not imported yet, so there are no threads
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    address = Path(options["address"])
    with os.fdopen(options["ready"], "wb") as ready:
        try:
            welcome = _load(Path(options["directory"]), options["device"], options["key"], options["threads"])
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(address))
            listener.listen(_MAX_WAITING)
        except Exception as error:
            ready.write(f"{type(error).__name__}: {error}".encode())
            raise
        ready.write(b"ready")
    serve(listener, welcome, options["linger_seconds"])
    address.unlink()  # before the listener is closed: a new holder may use the name from then on


def serve(listener: socket.socket, welcome: Any, linger_seconds: float) -> None:
    """Send `welcome()` to each replica, until none has been connected for some time.

    Args:
        listener: accepts replicas.
        welcome: makes the message; it is called for each replica.
        linger_seconds: time without replicas.
    """
    replicas: list[Connection] = []
    while True:
        ready = wait([listener, *replicas], None if replicas else linger_seconds)
        if not ready:
            return
        for each in ready:
            if isinstance(each, Connection):  # replicas send nothing: this one has ended
                replicas.remove(each)
                each.close()
                continue
            replica = Connection(listener.accept()[0].detach())
            try:
                replica.send(welcome())
            except OSError:  # it has ended already
                replica.close()
                continue
            replicas.append(replica)


def _load(directory: Path, device_name: str, key: str, threads: int) -> Any:
    """Load the model; returns a function that makes the message for a replica."""
    import torch
    import torch.multiprocessing  # so that CUDA tensors are pickled as handles

    from spotune.errors import JobError
    from spotune_serve.engine.load import load_model
    from spotune_serve.engine.weights.block import bytes_of, checksum, fill, layout_of, weights_of
    from spotune_serve.engine.weights.shared import handle_of, holder_key, new_block

    torch.set_num_threads(threads)
    device = torch.device(device_name)
    weights = weights_of(load_model(directory))
    layout = layout_of(weights)
    block, keeper = new_block(bytes_of(layout), device)
    fill(block, weights, layout)
    if holder_key(directory, device) != key:
        raise JobError(f"the files in {directory} changed while they were loaded. Start the service again.")
    total = checksum(block)

    def welcome() -> Any:
        return os.getpid(), layout, handle_of(block, keeper), total

    ForkingPickler.dumps(welcome())  # fails where memory cannot be shared
    return welcome


if __name__ == "__main__":
    main()
