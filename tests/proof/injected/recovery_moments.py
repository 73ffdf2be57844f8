"""Shows from outside what a worker group does before its first step, and when nodes send bytes to one another.

Each rank writes the phase that it begins to a file, and each thread that sends a segment writes how far it is. Both
take a little longer than they would, and content is sent in small chunks, so that a kill can hit the middle. Nothing
else changes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

MOMENTS = "SPOTUNE_PROOF_MOMENTS"
"""Variable that names the folder of these files."""
FRESH_SECONDS = 0.15
"""A thread that sends writes more often than this."""
_WORKER = "spotune_trainer.training.worker"
_CONNECTION = "spotune_trainer.checkpoint.memory.peer_connection"
_SEGMENT = "/memfd:spotune-snapshot"
_CHUNK_BYTES = 4096
_CHUNK_SECONDS = 0.006


class Phase(StrEnum):
    """What a rank does before its first step."""

    FORMING = "forming"
    LOADING = "loading"
    RESTORING = "restoring"
    RESTORED = "restored"


_PAUSES = {Phase.FORMING: 0.15, Phase.LOADING: 0.1, Phase.RESTORING: 0.05, Phase.RESTORED: 0.15}


class Wire(StrEnum):
    """Why a node sends a segment."""

    COPY = "copy"
    READ = "read"


_WIRES = {"peer sender": Wire.COPY, "peer": Wire.READ}
"""By the name of the thread of an agent."""


def show_moments(folder: str) -> None:
    """Write the files of this process to the folder from now on."""
    from after_import import after_import  # type: ignore[import-not-found]  # found by its folder there

    root = Path(folder)
    after_import(_WORKER, lambda worker: _show_phases(worker, root))
    after_import(_CONNECTION, lambda connection: setattr(connection, "CHUNK_BYTES", _CHUNK_BYTES))
    send = os.sendfile

    def slow_sendfile(out: int, source: int, offset: int, count: int) -> int:
        wire = _WIRES.get(threading.current_thread().name)
        if wire is not None and _is_segment(source):
            left = os.fstat(source).st_size - offset
            _write(root / f"{wire}-{os.getpid()}", {"time": time.monotonic(), "left": left})
            time.sleep(_CHUNK_SECONDS)
        return send(out, source, offset, count)

    os.sendfile = slow_sendfile  # type: ignore[assignment]


def phase_of(folder: Path, pid: int) -> Phase | None:
    """The phase that the rank with this process has begun last; None before the first."""
    value = _read(folder / f"phase-{pid}")
    return None if value is None else Phase(value["phase"])


def senders(folder: Path, wire: Wire) -> list[int]:
    """The processes that are in the middle of sending a segment."""
    now = time.monotonic()
    found = {int(path.name.rpartition("-")[2]): _read(path) for path in folder.glob(f"{wire}-*")}
    return [
        pid
        for pid, value in found.items()
        if value and now - value["time"] < FRESH_SECONDS and value["left"] > _CHUNK_BYTES
    ]


def _show_phases(worker: Any, folder: Path) -> None:
    _show(worker, "_init_process_group", Phase.FORMING, folder)
    _show(worker.Worker, "set_up", Phase.LOADING, folder)
    _show(worker.Worker, "restore", Phase.RESTORING, folder)
    _show(worker.Worker, "run_steps", Phase.RESTORED, folder)


def _show(owner: Any, name: str, phase: Phase, folder: Path) -> None:
    call: Callable[..., Any] = getattr(owner, name)

    def shown(*arguments: Any) -> Any:
        _write(folder / f"phase-{os.getpid()}", {"phase": phase})
        time.sleep(_PAUSES[phase])
        return call(*arguments)

    setattr(owner, name, shown)


def _is_segment(descriptor: int) -> bool:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(_SEGMENT)


def _write(path: Path, value: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return value
