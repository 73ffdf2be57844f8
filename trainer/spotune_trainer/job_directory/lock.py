"""One supervisor for a job directory at a time, by a lock that the kernel takes back from a killed one."""

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


@contextmanager
def locked_if_possible(directory: JobDirectory, seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock, or go on without it: a shared file system may keep that of a supervisor whose machine is gone.

    Generations fence off whatever an earlier supervisor still runs; the lock only spares it the wasted work.

    Args:
        directory: of the job.
        seconds: to wait for the lock.
        say: told when it is not to be had.
    """
    until = time.monotonic() + seconds
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(directory))
                break
            except UsageError as error:
                if time.monotonic() > until:
                    say(f"going on without the lock, held for {seconds:.0f} s: {error}")
                    break
            time.sleep(1)
        yield
