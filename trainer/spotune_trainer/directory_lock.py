"""One supervisor for a job directory at a time, by a lock that the kernel takes back from a killed one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from spotune.errors import UsageError
from spotune_trainer.layout import JobDirectory


@contextmanager
def locked(directory: JobDirectory) -> Iterator[None]:
    """Hold the lock of a directory, which is made where it is not there.

    Raises:
        UsageError: another one holds it.
    """
    directory.root.mkdir(parents=True, exist_ok=True)
    path = directory.root / ".supervisor.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 20, 0).decode().strip() or "unknown"
            raise UsageError(
                f"{directory.root} is being trained by another spotune run (process {owner}): "
                "wait for it, stop it with Ctrl-C, or use another --directory"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
