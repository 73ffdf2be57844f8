"""Read fragments back: any range of any parameter, whoever wrote it, with the checksums verified.

A reader knows from the headers where in the ranks' files each fragment lies, and reads the ranges it is asked for and
nothing else, straight into place. They are read, not mapped: a volume that fails is then an error, and no SIGBUS.
Files are verified whole (XXH3-64, memory speed), shared out over the ranks of the reading group so that each byte is
hashed once.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from spotune.errors import SpotuneError
from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.layout import Checkpoint, FileEntry

_HASH_BLOCK_BYTES = 16 << 20
_ELEMENT_BYTES = 4
_PIECE_ELEMENTS = 1 << 24
"""64 MiB: what is on its way to a device takes no more host memory, for each reader."""
_READERS = 4
"""Threads that read at the same time: a single one waits for each answer of a volume, and each copy to a device."""


class CorruptCheckpointError(SpotuneError):
    """A committed checkpoint does not hold what its manifest says."""

    def __init__(self, checkpoint: str, reason: str) -> None:
        super().__init__(f"checkpoint {checkpoint} is corrupt: {reason}")
        self.checkpoint = checkpoint
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpointError], tuple[str, str]]:
        """Exceptions travel between processes by their constructor's arguments."""
        return type(self), (self.checkpoint, self.reason)


@dataclass(frozen=True)
class _Run:
    """One tensor within a rank's file: elements [offset, offset + length) of a parameter, from byte `position` on."""

    file: str
    position: int
    offset: int
    length: int


@dataclass(frozen=True)
class _Part:
    """Bytes of a file from `position` on, and the 1-D fp32 view that they belong into."""

    file: str
    position: int
    out: Tensor


def verify(checkpoint: Checkpoint, entries: Iterable[FileEntry] | None = None) -> None:
    """Compare the content of the files with the manifest's checksums.

    Args:
        checkpoint: what to verify.
        entries: only these of its files; all by default.

    Raises:
        CorruptCheckpointError: a file is missing, cut short or changed; the first found is named.
    """
    for entry in checkpoint.manifest.files if entries is None else entries:
        found = _digest(checkpoint, entry)
        if found != entry.xxh3:
            raise CorruptCheckpointError(
                str(checkpoint.name), f"{entry.name} has checksum {found}, its manifest says {entry.xxh3}"
            )


class CheckpointReader:
    """Random access to the fragments of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._runs: dict[tuple[str, str], list[_Run]] = defaultdict(list)
        for entry in checkpoint.manifest.files:
            for parameter, state, run in self._header(entry.name):
                self._runs[parameter, state].append(run)

    def read(self, parameter: str, state: str, offset: int, out: Tensor) -> None:
        """Copy elements [offset, offset + out.numel()) of a parameter's state into the 1-D fp32 tensor `out`.

        Raises:
            CorruptCheckpointError: the files together do not cover that range, or cannot be read.
        """
        self._fill(self._parts(parameter, state, offset, out))

    def restore(self, fragments: Iterable[Fragment]) -> None:
        """Fill the fragments' states in place; raises as `read` does."""
        parts = [
            part
            for fragment in fragments
            for state in STATES
            for part in self._parts(fragment.parameter, state, fragment.offset, fragment.states[state])
        ]
        # Each file is opened once and, roughly, read from front to back.
        self._fill(sorted(parts, key=lambda part: (part.file, part.position)))

    def _parts(self, parameter: str, state: str, offset: int, out: Tensor) -> list[_Part]:
        """Where the elements of `out` lie."""
        parts: list[_Part] = []
        missing = out.numel()
        for run in self._runs.get((parameter, state), ()):
            start = max(offset, run.offset)
            end = min(offset + out.numel(), run.offset + run.length)
            if start < end:
                position = run.position + (start - run.offset) * _ELEMENT_BYTES
                parts.append(_Part(run.file, position, out.detach()[start - offset : end - offset]))
                missing -= end - start
        if missing != 0:
            raise self._corrupt(
                f"{missing} of {out.numel()} elements of {parameter} ({state}) from {offset} are in no file"
            )
        return parts

    def _fill(self, parts: Sequence[_Part]) -> None:
        room = _Room()
        with ExitStack() as opened, ThreadPoolExecutor(_READERS, thread_name_prefix="restore") as readers:
            files = {file: self._open(file, opened) for file in dict.fromkeys(part.file for part in parts)}
            reading = [readers.submit(self._read_part, part, files[part.file], room) for part in parts]
            try:
                for each in reading:
                    each.result()
            except CorruptCheckpointError:
                readers.shutdown(cancel_futures=True)
                raise

    def _open(self, file: str, opened: ExitStack) -> int:
        """The descriptor of a file, until `opened` is closed."""
        try:
            return opened.enter_context((self.checkpoint.path / file).open("rb", buffering=0)).fileno()
        except OSError as error:
            raise self._corrupt(f"{file} cannot be read: {error}") from error

    def _read_part(self, part: _Part, descriptor: int, room: _Room) -> None:
        try:
            _read_into(part.out, descriptor, part.position, room)
        except OSError as error:
            raise self._corrupt(f"{part.file} cannot be read: {error}") from error

    def _header(self, file: str) -> Iterator[tuple[str, str, _Run]]:
        """Parameter, state and place of every tensor in a file."""
        try:
            with (self.checkpoint.path / file).open("rb", buffering=0) as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header: dict[str, Any] = json.loads(stream.read(length))
        except (OSError, ValueError, struct.error) as error:
            raise self._corrupt(f"{file} cannot be read: {error}") from error
        for name, value in header.items():
            parameter, offset, state = name.rsplit("|", 2)
            start, end = value["data_offsets"]
            yield parameter, state, _Run(file, 8 + length + start, int(offset), (end - start) // _ELEMENT_BYTES)

    def _corrupt(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(str(self.checkpoint.name), reason)


def read_parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The fp32 master of every trainable parameter, by name and in its shape, in host memory.

    Raises:
        CorruptCheckpointError: the files do not cover every parameter.
    """
    reader = CheckpointReader(checkpoint)
    parameters: dict[str, Tensor] = {}
    for name, shape in checkpoint.manifest.parameters.items():
        flat = torch.empty(int(np.prod(shape, dtype=np.int64)), dtype=torch.float32)
        reader.read(name, "fp32", 0, flat)
        parameters[name] = flat.view(shape)
    return parameters


def _digest(checkpoint: Checkpoint, entry: FileEntry) -> str:
    digest = xxhash.xxh3_64()
    try:
        with (checkpoint.path / entry.name).open("rb") as stream:
            while block := stream.read(_HASH_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise CorruptCheckpointError(str(checkpoint.name), f"{entry.name} cannot be read: {error}") from error
    return digest.hexdigest()


class _Room(threading.local):
    """Host memory for what a thread has on its way to a device, page-locked, taken once there is something for one."""

    _buffer: Tensor | None = None

    def __call__(self, elements: int) -> Tensor:
        """So many elements of it, at most `_PIECE_ELEMENTS`."""
        if self._buffer is None:
            self._buffer = torch.empty(_PIECE_ELEMENTS, dtype=torch.float32, pin_memory=True)
        return self._buffer[:elements]


def _read_into(out: Tensor, descriptor: int, position: int, room: _Room) -> None:
    """Read bytes of a file into a 1-D fp32 tensor on any device.

    Raises:
        OSError: the file cannot be read, or ends too early.
    """
    for piece in torch.split(out, _PIECE_ELEMENTS):
        host = piece if piece.device.type == "cpu" else room(piece.numel())
        elements: Any = host.numpy()
        block = memoryview(elements).cast("B")
        while block:
            count = os.preadv(descriptor, [block], position)
            if count == 0:
                raise OSError(f"it ends at byte {position}")
            block, position = block[count:], position + count
        if host is not piece:
            piece.copy_(host)
