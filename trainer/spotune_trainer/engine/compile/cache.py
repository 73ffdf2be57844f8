"""torch.compile's cache artifacts, kept in the job's directory so that the next attempt does not compile again."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from spotune_trainer import files

logger = logging.getLogger("spotune.worker")


class CompileCache:
    """A file with the artifacts of this kind of device and version of PyTorch.

    Args:
        folder: in the job's directory; shared by all ranks and generations.
        writes: whether this rank writes the file; one rank does.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.path = folder / (re.sub(r"[^a-zA-Z0-9.]+", "-", f"{device} torch {torch.__version__}") + ".bin")
        self._writes = writes
        self._keys_on_disk: set[str] = set()
        self._thread: threading.Thread | None = None

    def load(self) -> None:
        """Load the artifacts. If the file is missing or damaged, everything is compiled again.

        PyTorch verifies the file and logs what is wrong with it.
        """
        with suppress(OSError):
            self._keys_on_disk = _keys(torch.compiler.load_cache_artifacts(self.path.read_bytes()))

    def save(self) -> None:
        """Write the artifacts in a thread, if this process has compiled anything that is not in the file."""
        if not self._writes or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._write, name="compile-cache", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write that `save` started."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            return
        artifacts, info = saved
        if _keys(info) <= self._keys_on_disk:
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            files.write_bytes(self.path, artifacts)
        except OSError as error:
            logger.warning("could not write the compile cache %s: %s", self.path.name, error)
            return
        self._keys_on_disk = _keys(info)


def _keys(info: Any) -> set[str]:
    """Names of the artifacts in PyTorch's `CacheInfo`; empty for None."""
    artifacts = info.artifacts if info is not None else {}
    return {f"{kind}/{key}" for kind, keys in artifacts.items() for key in keys}
