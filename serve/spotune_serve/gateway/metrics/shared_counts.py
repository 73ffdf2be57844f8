"""Numbers that gateway processes count, and their sums over all processes that share a folder.

A process writes its numbers into files of its own, which it maps into memory. The others read them there without asking
it, and a killed process leaves what it has counted. A lock on one more file shows whether the process still runs: the
kernel releases it, and no later process can be taken for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
import uuid
import weakref
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import IO, Any, Final

_REUSE_SECONDS: Final = 1.0
_NUMBER_BYTES: Final = array("d").itemsize
_DIGEST_BYTES: Final = 16

Numbers = MutableSequence[float]
"""Numbers of 64 bits in memory: an `array`, or the content of a file as a `memoryview`."""


class CountFolder:
    """The folder that gateway processes share.

    Args:
        path: the folder; it is made if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._process = uuid.uuid4().hex
        # Locked before the others can see it: an unlocked file means that its process is dead.
        unlocked = path / f".{self._process}.lock"
        lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        weakref.finalize(self, os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(path / f"{self._process}.lock")
        self._dead: set[str] = set()

    def create(self, name: str, size: int) -> Numbers:
        """Numbers of this process, all zero at first.

        Args:
            name: what the other processes read them by.
            size: how many.
        """
        unfinished = self.path / f".{self._process}.counts"
        with unfinished.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, size * _NUMBER_BYTES)  # a full disk would kill whoever counts later
            numbers = _mapped(file, size * _NUMBER_BYTES)
        unfinished.rename(self._file(self._process, name))
        return numbers

    def remove(self, name: str) -> None:
        """Remove the numbers of this process."""
        self._file(self._process, name).unlink(missing_ok=True)

    def others(self, name: str) -> dict[str, Numbers]:
        """The numbers of all other processes, dead ones too, by their random ids."""
        found: dict[str, Numbers] = {}
        for path in self.path.glob(self._file("*", name).name):
            process = path.name.partition(".")[0]
            if process != self._process:
                with path.open("rb") as file:
                    found[process] = _mapped(file)
        return found

    def is_alive(self, process: str) -> bool:
        """Whether another process still runs."""
        if process not in self._dead:
            with (self.path / f"{process}.lock").open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
            self._dead.add(process)
        return False

    def _file(self, process: str, name: str) -> Path:
        digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return self.path / f"{process}.{digest}.counts"


class Counts:
    """Some numbers of this process, and their sums over all.

    Args:
        size: how many numbers.
        num_gauges: that many of them, the first ones, are gauges: those of dead processes do not count.
        folder: that all processes share; None: there is one process.
        name: what the numbers have been counted for, unique in the folder.
        clock: returns monotonic seconds.

    Attributes:
        own: the numbers of this process.
    """

    def __init__(
        self,
        size: int,
        num_gauges: int,
        folder: CountFolder | None = None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_gauges = num_gauges
        self._folder = folder
        self._name = name
        self._clock = clock
        self.own: Numbers = array("d", bytes(size * _NUMBER_BYTES)) if folder is None else folder.create(name, size)
        self._alive: Sequence[Numbers] = ()
        self._dead: Sequence[Numbers] = ()
        self._read_at = float("-inf")

    def totals(self) -> list[float]:
        """The sums over all processes."""
        self._find_others()
        sums = [sum(each) for each in zip(self.own, *self._alive, strict=True)]
        for numbers in self._dead:
            for index in range(self._num_gauges, len(sums)):
                sums[index] += numbers[index]
        return sums

    def gauge(self, index: int) -> float:
        """The sum of one gauge. A process that started or died within the last second may not be known yet."""
        value = self.own[index]
        if self._folder is not None:
            if self._clock() - self._read_at >= _REUSE_SECONDS:
                self._find_others()
            value += sum(numbers[index] for numbers in self._alive)
        return value

    def remove(self) -> None:
        """Forget what this process has counted."""
        if self._folder is not None:
            self._folder.remove(self._name)

    def _find_others(self) -> None:
        if self._folder is None:
            return
        self._read_at = self._clock()
        others = self._folder.others(self._name)
        alive = {process for process in others if self._folder.is_alive(process)}
        self._alive = [numbers for process, numbers in others.items() if process in alive]
        self._dead = [numbers for process, numbers in others.items() if process not in alive]


class Count:
    """One number of this process."""

    def __init__(self, counts: Counts, index: int) -> None:
        self._own = counts.own
        self._index = index

    @property
    def value(self) -> float:
        """What this process has counted."""
        return self._own[self._index]

    def inc(self, amount: float = 1.0) -> None:
        """Add to it."""
        self._own[self._index] += amount

    def dec(self) -> None:
        """Subtract 1."""
        self._own[self._index] -= 1.0


def _mapped(file: IO[bytes], size: int = 0) -> Numbers:
    """The content of a file; it can be written if the file can."""
    access = mmap.ACCESS_WRITE if file.writable() else mmap.ACCESS_READ
    numbers: Any = memoryview(mmap.mmap(file.fileno(), size, access=access)).cast("d")
    found: Numbers = numbers
    return found
