"""A lock between the processes of one node."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock; one process at a time. The kernel releases that of a killed process.

    Args:
        path: file of the lock, which is created and stays. Its folder exists.
    """
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
