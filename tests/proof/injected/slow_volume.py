"""A volume and a network as slow as real ones, so that a step, a save, a restore and an export can be hit.

What the product does is not touched: the calls of the operating system by which it reads and writes its job directory,
or reads shared memory, and the all-reduce between the ranks at the end of a step, take a while, as long as a file
beside the directory says, which may change at any time.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOLUME = "SPOTUNE_PROOF_VOLUME"
"""Variable that names the job directory."""
_SHARED_MEMORY = "/memfd:spotune-snapshot"
_LOOP = "spotune_trainer.training.loop"


@dataclass(frozen=True)
class Latency:
    """Seconds a call.

    Attributes:
        step: of the all-reduce of a step, so that training has a pace.
        write: of a tensor.
        read: of a tensor.
        fsync: of any file or folder.
    """

    step: float = 0.08
    write: float = 0.001
    read: float = 0.004
    fsync: float = 0.03


def set_latency(directory: Path, latency: Latency) -> None:
    """From now on calls on the job directory take so long, in processes that have `VOLUME` in their environment."""
    file = _settings(str(directory))
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(asdict(latency)))
    draft.replace(file)


def slow_down(directory: str) -> None:
    """Make the calls of this process slow."""

    def slow(name: str, what: str) -> None:
        call: Any = getattr(os, name)

        def slow_call(descriptor: int, *rest: Any) -> Any:
            _wait(directory, descriptor, what)
            return call(descriptor, *rest)

        setattr(os, name, slow_call)

    slow("fsync", "fsync")
    slow("preadv", "read")
    slow("write", "write")
    from after_import import after_import  # type: ignore[import-not-found]  # found by its folder there

    after_import(_LOOP, lambda loop: _slow_network(loop, directory))


def _slow_network(loop: Any, directory: str) -> None:
    """Let the all-reduce of a step wait, and nobody else's."""
    fast = loop.distributed

    class SlowNetwork:
        def __getattr__(self, name: str) -> Any:
            return getattr(fast, name)

        def all_reduce(self, *arguments: Any, **options: Any) -> Any:
            time.sleep(_seconds(directory, "step"))
            return fast.all_reduce(*arguments, **options)

    loop.distributed = SlowNetwork()


def _wait(directory: str, descriptor: int, what: str) -> None:
    try:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return
    if path.startswith((directory, _SHARED_MEMORY)):
        time.sleep(_seconds(directory, what))


def _seconds(directory: str, what: str) -> float:
    return float(json.loads(_settings(directory).read_text())[what])


def _settings(directory: str) -> Path:
    return Path(directory + ".volume.json")
