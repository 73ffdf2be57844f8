"""The lock of a job directory: one supervisor at a time. The kernel releases the lock of a killed process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from spotune.errors import UsageError
from spotune_trainer.job_directory.layout import JobDirectory


@contextmanager
def locked(directory: JobDirectory) -> Iterator[None]:
    """Hold the lock of a directory, which is created if needed.

    Raises:
        UsageError: another process holds the lock.
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


@contextmanager
def locked_if_possible(directory: JobDirectory, seconds: float, log: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock if it becomes free within `seconds`; otherwise continue without it.

    A shared file system can keep the lock of a supervisor whose machine is lost. Continuing is safe: generations fence
    off the workers of another supervisor, and the lock only avoids wasted work.

    Args:
        directory: of the job.
        seconds: time to wait for the lock.
        log: gets a message if the lock is not free in time.
    """
    until = time.monotonic() + seconds
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(directory))
                break
            except UsageError as error:
                if time.monotonic() > until:
                    log(f"continuing without the lock, which was not free within {seconds:.0f} s: {error}")
                    break
            time.sleep(1)
        yield
