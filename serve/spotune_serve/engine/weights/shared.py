"""Replicas that share a GPU share one copy of the weights, by CUDA IPC.

The memory belongs to a process of its own, the holder (`holder.py`), because CUDA leaves undefined what the others
read once the process that exported memory has freed it or ended. The first replica of a model on a GPU starts the
holder, under a lock. Later ones connect to its Unix socket and get a handle of the memory. Each replica keeps its
connection open. So the holder knows when the last one has left, and a replica knows when the holder has died: it then
fails its sequences and its health check.

A holder serves one model on one GPU: the same files (path, size, time of change), type of the weights, GPU and
versions of the libraries. A replica compares names, types, shapes and a checksum before it uses the memory. CUDA IPC
has no read-only mappings: nothing in the engine writes to weights, adapters included.

Only replicas of one container share: containers have `/tmp` and IPC namespaces of their own. A pod with one replica
gains nothing from this module.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from spotune.errors import InfrastructureError, JobError
from spotune_serve.engine.base import EngineLostError
from spotune_serve.engine.weights.block import attach, checksum, layout_of, move_to, weights_of
from spotune_serve.file_lock import locked

_log = logging.getLogger(__name__)

_HOLDER = "spotune_serve.engine.weights.holder"
_LINGER_SECONDS = 30.0
"""A holder without replicas ends after this time. A replica that is replaced finds it again."""
_READY = b"ready"
_ATTEMPTS = 3


class SharedWeights:
    """A replica's connection to the holder. It must live as long as the replica uses the weights.

    Args:
        connection: to the holder.
        holder: process id of the holder.
        size: bytes of the shared memory.

    Attributes:
        holder: see above.
        size: see above.
    """

    def __init__(self, connection: Connection, holder: int, size: int) -> None:
        self._connection = connection
        self.holder = holder
        self.size = size

    def check(self) -> None:
        """Raise EngineLostError if the holder has ended, so that the memory may have other contents."""
        if self._connection.closed or self._connection.poll():  # the holder sends nothing more: this is its end
            raise EngineLostError("the process that holds the weights on this GPU has ended")

    def close(self) -> None:
        """Let the holder end. The weights must not be used afterwards."""
        self._connection.close()


def share_weights(
    model: nn.Module,
    directory: Path,
    device: torch.device,
    *,
    sockets: Path | None = None,
    linger_seconds: float = _LINGER_SECONDS,
) -> SharedWeights:
    """Replace the weights of a model by those that the replicas of this device share.

    Args:
        model: on processors, as `load_model` returns it. It is changed in place.
        directory: from which the model was loaded.
        device: a GPU, or `cpu`.
        sockets: folder for locks and sockets; None: one of this user in the folder for temporary files.
        linger_seconds: see `_LINGER_SECONDS`; used if this replica starts the holder.

    Raises:
        JobError: the model cannot be loaded, or its files change.
        InfrastructureError: the holder could not start, for example because memory ran out.
    """
    folder = _private_folder(sockets or Path(tempfile.gettempdir()) / f"spotune-weights-{os.getuid()}")
    key = holder_key(directory, device)
    address = folder / f"{key}.socket"
    for _ in range(_ATTEMPTS):
        with locked(folder / f"{key}.lock"):
            connection = _connect(address)
            if connection is None:
                _start_holder(address, directory, device, key, linger_seconds)
                connection = _connect(address)
        try:
            if connection is not None:
                return _attach(model, directory, connection)
        except (EOFError, ConnectionResetError):  # a holder without replicas ends at this moment
            continue
    raise InfrastructureError(f"the process that holds the weights ends at once; see {address.with_suffix('.log')}")


def _attach(model: nn.Module, directory: Path, connection: Connection) -> SharedWeights:
    try:
        holder, layout, handle, total = connection.recv()
    except RuntimeError as error:
        raise InfrastructureError(f"the memory of another process cannot be mapped: {error}") from error
    weights = weights_of(model)
    block = open_block(handle)
    if layout != layout_of(weights) or checksum(block) != total:
        raise JobError(f"{directory} has other weights than the replicas that run. Restart all replicas.")
    attach(weights, block, layout)
    return SharedWeights(connection, holder, len(block))


def share_or_copy_weights(
    model: nn.Module, directory: Path, device: torch.device, sockets: Path | None = None
) -> Callable[[], None]:
    """As `share_weights`; a copy of the weights is loaded where they cannot be shared, for example without CUDA IPC.

    Returns:
        A check that raises EngineLostError if the weights may have changed.

    Raises:
        JobError: see `share_weights`.
    """
    try:
        return share_weights(model, directory, device, sockets=sockets).check
    except InfrastructureError as error:
        _log.warning("this replica loads a copy of the weights of its own: %s", error)
    move_to(model, device)
    return lambda: None


def holder_key(directory: Path, device: torch.device) -> str:
    """The name of the holder for a model on a device.

    Raises:
        JobError: a file cannot be read.
    """
    try:
        files = [
            (path.name, status.st_size, status.st_mtime_ns, status.st_ino)
            for path in sorted([directory / "config.json", *directory.glob("*.safetensors*")])
            for status in [path.stat()]
        ]
    except OSError as error:
        raise JobError(f"the model in {directory} cannot be read: {error}. Copy the complete folder.") from error
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    versions = [torch.__version__, transformers.__version__]
    what = json.dumps([str(directory.resolve()), files, str(device), gpu, versions])
    return hashlib.sha256(what.encode()).hexdigest()[:24]


def new_block(size: int, device: torch.device) -> tuple[Tensor, Any]:
    """Memory that other processes can map, uint8 [size], and what keeps it."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device), None
    descriptor = os.memfd_create("weights")
    os.truncate(descriptor, size)
    return open_block((os.getpid(), descriptor, size)), descriptor


def handle_of(block: Tensor, keeper: Any) -> Any:
    """What another process needs to map the memory. CUDA memory needs a new handle for each process."""
    return block if block.device.type == "cuda" else (os.getpid(), keeper, len(block))


def open_block(handle: Any) -> Tensor:
    """The memory, in another process. A CUDA block has been mapped when the handle was unpickled, by torch."""
    if isinstance(handle, Tensor):
        return handle
    process, descriptor, size = handle
    return torch.from_file(f"/proc/{process}/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)


def _connect(address: Path) -> Connection | None:
    """The connection to a holder; None if no holder runs."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(str(address))
    except (FileNotFoundError, ConnectionRefusedError):
        end.close()
        return None
    return Connection(end.detach())


def _start_holder(address: Path, directory: Path, device: torch.device, key: str, linger_seconds: float) -> None:
    """Start a holder, and wait until it listens."""
    address.unlink(missing_ok=True)
    ready, write = os.pipe()
    options = {"directory": str(directory), "device": str(device), "key": key, "linger_seconds": linger_seconds}
    options |= {"address": str(address), "ready": write, "threads": torch.get_num_threads()}
    log = address.with_suffix(".log")
    with os.fdopen(ready, "rb") as messages, log.open("wb") as output:
        try:
            subprocess.run(
                [sys.executable, "-m", _HOLDER, json.dumps(options)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[write], check=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            raise InfrastructureError(f"the process that holds the weights cannot start: {error}; see {log}") from error
        finally:
            os.close(write)
        message = messages.read()
    if message != _READY:
        kind, _, text = message.decode(errors="replace").partition(": ")
        if kind == JobError.__name__:
            raise JobError(text)
        raise InfrastructureError(f"the holder of the weights has failed: {kind or 'killed'} {text} See {log}.")


def _private_folder(folder: Path) -> Path:
    """The folder, made if needed. Nobody else may put a socket there: what it sends is unpickled."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise InfrastructureError(f"{folder} must be a folder that only this user can access. Remove it.")
    return folder
