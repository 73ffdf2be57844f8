"""Read any range of any parameter from a checkpoint, whatever world size and ZeRO stage wrote it.

A reader takes from the headers of the ranks' files where each fragment lies, and reads only the requested ranges,
directly into their tensors. It uses `pread`, not `mmap`: a volume that fails then raises an error instead of SIGBUS.
A file of which a segment of shared memory holds the bytes is read there.

Checksums (XXH3-64, as fast as memory) cover whole files. `verify` takes a subset of the files, so the ranks of a
worker group can share the work and hash each byte once.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from spotune.errors import InfrastructureError, SpotuneError
from spotune.job import TrainingSpec
from spotune_trainer import files
from spotune_trainer.checkpoint.fragment import EMA, MASTER, SCHEDULE_FREE_BASE, Fragment
from spotune_trainer.checkpoint.in_bucket.files import BucketFiles, DamagedFileError
from spotune_trainer.checkpoint.layout import Checkpoint, FileEntry
from spotune_trainer.checkpoint.memory.digests import checksum
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Segment

_ELEMENT_BYTES = 4
_LENGTH = struct.Struct("<Q")
"""What a safetensors file begins with: the length of its header."""
_CHUNK_ELEMENTS = 1 << 24
"""64 MiB: the pinned host buffer of each thread, for data on its way to a device."""
_INVALID_HEADER = (*files.INVALID_CONTENT, struct.error)
"""What a damaged header raises."""
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""What is raised if there is no such file. Any other OSError says nothing about the file, only about the volume."""
_READER_THREADS = 4
"""A single thread would wait for each response of the volume and for each copy to a device."""


class CorruptCheckpointError(SpotuneError):
    """The files of a committed checkpoint do not match its manifest."""

    def __init__(self, checkpoint: str, reason: str) -> None:
        super().__init__(f"checkpoint {checkpoint} is corrupt: {reason}")
        self.checkpoint = checkpoint
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpointError], tuple[str, str]]:
        """Pickle by the arguments of the constructor: ranks send this error to the driver."""
        return type(self), (self.checkpoint, self.reason)


class UnreadableCheckpointError(InfrastructureError):
    """The volume failed while a checkpoint was read. The checkpoint may be whole, so it is tried again."""


@dataclass(frozen=True)
class _StoredRange:
    """One tensor in a rank's file: elements [offset, offset + length) of a parameter, at byte `position`."""

    file: str
    position: int
    offset: int
    length: int


@dataclass(frozen=True)
class _Source:
    """An open file or segment: its descriptor, and the byte at which the file's content begins."""

    descriptor: int
    start: int


@dataclass(frozen=True)
class _Read:
    """One read: from byte `position` of a file into the 1-D fp32 view `out`."""

    file: str
    position: int
    out: Tensor


def verify(checkpoint: Checkpoint, entries: Iterable[FileEntry] | None = None) -> None:
    """Check the contents of files against the checksums in the manifest.

    Args:
        checkpoint: the checkpoint to verify.
        entries: the files to check; by default all of them.

    Raises:
        CorruptCheckpointError: a file is missing, truncated or changed. It names the first such file.
        UnreadableCheckpointError: the volume failed.
    """
    for entry in checkpoint.manifest.files if entries is None else entries:
        found = _digest(checkpoint, entry)
        if found != entry.xxh3:
            raise CorruptCheckpointError(
                str(checkpoint.name), f"{entry.name} has checksum {found}, its manifest records {entry.xxh3}"
            )


def fetch(
    checkpoint: Checkpoint, entries: Iterable[FileEntry] | None = None, heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Have files on this machine, verified, if a bucket is the storage; otherwise this does nothing.

    Args:
        checkpoint: the checkpoint.
        entries: the files; by default all of them.
        heartbeat: called after each file.

    Raises:
        BucketError: the bucket cannot be read.
        CorruptCheckpointError: it has no such file, or another one than was committed.
    """
    in_bucket = BucketFiles.of(checkpoint.path)
    if in_bucket is None:
        return
    try:
        in_bucket.fetch(checkpoint.manifest.files if entries is None else entries, heartbeat)
    except DamagedFileError as error:
        raise CorruptCheckpointError(str(checkpoint.name), str(error)) from error


class CheckpointReader:
    """Random access to the fragments of one checkpoint.

    All that reads raises UnreadableCheckpointError if the volume fails.

    Args:
        checkpoint: the checkpoint.
        segments: segments of shared memory that hold some of its files, by the name of the file.
        headers: what other files begin with, up to their first tensor, if that is known already.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        segments: Mapping[str, Segment] = MappingProxyType({}),
        headers: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        self.checkpoint = checkpoint
        self._segments = segments
        self._headers = headers
        self._stored: dict[tuple[str, str], list[_StoredRange]] = defaultdict(list)
        for entry in checkpoint.manifest.files:
            for parameter, state, stored in self._read_header(entry):
                self._stored[parameter, state].append(stored)

    def read(self, parameter: str, state: str, offset: int, out: Tensor) -> None:
        """Copy elements [offset, offset + out.numel()) of a parameter's state into the 1-D fp32 tensor `out`.

        Raises:
            CorruptCheckpointError: the files do not cover that range, or are missing or too short.
        """
        self._execute(self._plan(parameter, state, offset, out))

    def restore(self, fragments: Iterable[Fragment]) -> None:
        """Fill the states of the fragments in place.

        Raises:
            CorruptCheckpointError: the files do not cover a fragment, or are missing or too short.
        """
        # In this order each file is read roughly from front to back.
        self._execute(sorted(self._plan_all(fragments), key=lambda read: (read.file, read.position)))

    def bytes_by_file(self, fragments: Iterable[Fragment]) -> dict[str, int]:
        """How many bytes `restore` reads from each file.

        Raises:
            CorruptCheckpointError: the files do not cover a fragment.
        """
        counts: Counter[str] = Counter()
        for read in self._plan_all(fragments):
            counts[read.file] += read.out.numel() * _ELEMENT_BYTES
        return dict(counts)

    def _plan_all(self, fragments: Iterable[Fragment]) -> list[_Read]:
        return [
            read
            for fragment in fragments
            for state, tensor in fragment.states.items()
            for read in self._plan(fragment.parameter, state, fragment.offset, tensor)
        ]

    def _plan(self, parameter: str, state: str, offset: int, out: Tensor) -> list[_Read]:
        """The reads that fill `out`: the overlaps of its range with the stored ranges."""
        reads: list[_Read] = []
        missing = out.numel()
        for stored in self._stored.get((parameter, state), ()):
            start = max(offset, stored.offset)
            end = min(offset + out.numel(), stored.offset + stored.length)
            if start < end:
                position = stored.position + (start - stored.offset) * _ELEMENT_BYTES
                reads.append(_Read(stored.file, position, out.detach()[start - offset : end - offset]))
                missing -= end - start
        if missing != 0:
            raise self._corrupt(
                f"{missing} of {out.numel()} elements of {parameter} ({state}) from {offset} are in no file"
            )
        return reads

    def _execute(self, reads: Sequence[_Read]) -> None:
        pinned = _PinnedBuffer()
        with ExitStack() as opened, ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="restore") as threads:
            sources = {file: self._open(file, opened) for file in dict.fromkeys(read.file for read in reads)}
            pending = [threads.submit(self._read, read, sources[read.file], pinned) for read in reads]
            try:
                for each in pending:
                    each.result()
            except SpotuneError:
                threads.shutdown(cancel_futures=True)
                raise

    def _open(self, file: str, opened: ExitStack) -> _Source:
        """Open a file, or the segment that holds its bytes; `opened` closes it."""
        segment = self._segments.get(file)
        try:
            if segment is not None:
                return _Source(opened.enter_context(segment.open()).fileno(), LABEL_BYTES)
            return _Source(opened.enter_context((self.checkpoint.path / file).open("rb", buffering=0)).fileno(), 0)
        except OSError as error:
            raise self._failure(file, error) from error

    def _read(self, read: _Read, source: _Source, pinned: _PinnedBuffer) -> None:
        try:
            _read_into(read.out, source.descriptor, source.start + read.position, pinned)
        except EOFError as error:
            raise self._corrupt(f"{read.file} cannot be read: {error}") from error
        except OSError as error:
            raise self._failure(read.file, error) from error

    def _read_header(self, entry: FileEntry) -> list[tuple[str, str, _StoredRange]]:
        """Parameter, state and range of every tensor in a file."""
        try:
            encoded = self._header_json(entry)
            start = _LENGTH.size + len(encoded)
            return [_stored_tensor(entry, start, name, value) for name, value in json.loads(encoded).items()]
        except _INVALID_HEADER as error:
            raise self._corrupt(f"{entry.name} cannot be read: {error}") from error
        except OSError as error:
            raise self._failure(entry.name, error) from error

    def _header_json(self, entry: FileEntry) -> bytes:
        if entry.name in self._headers and entry.name not in self._segments:
            return self._headers[entry.name][_LENGTH.size :]
        with ExitStack() as opened:
            source = self._open(entry.name, opened)
            (length,) = _LENGTH.unpack(os.pread(source.descriptor, _LENGTH.size, source.start))
            if length > entry.size:  # before memory is allocated for it
                raise ValueError(f"its header has {length} bytes, and the file {entry.size}")
            return os.pread(source.descriptor, length, source.start + _LENGTH.size)

    def _failure(self, file: str, error: OSError) -> SpotuneError:
        """The error of a failed read. If it was of a segment, the file is wanted from the volume, as if damaged."""
        if file in self._segments:
            return self._corrupt(f"{file} cannot be read: {error}")
        return _read_failure(self.checkpoint, file, error)

    def _corrupt(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(str(self.checkpoint.name), reason)


def _read_failure(checkpoint: Checkpoint, file: str, error: OSError) -> SpotuneError:
    """The error of a failed read of the volume: a file that is not there is lost, any other may be whole."""
    if isinstance(error, _MISSING):
        return CorruptCheckpointError(str(checkpoint.name), f"{file} cannot be read: {error}")
    reason = error.strerror or error
    return UnreadableCheckpointError(f"{checkpoint.path / file} cannot be read ({reason}): is the volume available?")


def _stored_tensor(entry: FileEntry, data: int, name: str, value: Any) -> tuple[str, str, _StoredRange]:
    """Parameter, state and range of a tensor by its entry in the header; `data` is the byte at which the data begins.

    Raises:
        ValueError: it lies outside of the file, or the name or entry is invalid in another way.
    """
    parameter, offset, state = name.rsplit("|", 2)
    start, end = value["data_offsets"]
    if not 0 <= start <= end <= entry.size - data:
        raise ValueError(f"{name} lies outside of the file")
    return parameter, state, _StoredRange(entry.name, data + start, int(offset), (end - start) // _ELEMENT_BYTES)


def read_parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The fp32 master weight of every trainable parameter, by name, in its own shape and in host memory.

    Raises:
        CorruptCheckpointError: the files do not cover every parameter.
    """
    return _read_state(checkpoint, MASTER)


def read_trained_weights(
    checkpoint: Checkpoint, training: TrainingSpec, heartbeat: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """The fp32 weights to evaluate and export: the masters or, with schedule-free AdamW, the averages.

    Shapes and errors are those of `read_parameters`. `heartbeat` is called after each tensor that was read.
    """
    masters = _read_state(checkpoint, MASTER, heartbeat)
    if training.optimizer != "schedule_free_adamw":
        return masters
    base = _read_state(checkpoint, SCHEDULE_FREE_BASE, heartbeat)
    return {name: schedule_free_average(master, base[name], training.adam_beta1) for name, master in masters.items()}


def read_ema(checkpoint: Checkpoint, heartbeat: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """The exponential moving average of every trained weight; otherwise like `read_trained_weights`."""
    return _read_state(checkpoint, EMA, heartbeat)


def schedule_free_average(master: Tensor, base: Tensor, beta1: float) -> Tensor:
    """The average x of schedule-free AdamW, a new tensor.

    Training computes gradients at y = (1 - beta1) z + beta1 x (Defazio et al. 2024, "The Road Less Scheduled",
    equation 1), so x = y + (1 - 1 / beta1) (z - y).

    Args:
        master: y.
        base: z, of the same shape.
        beta1: `training.adamBeta1`; not 0.
    """
    return torch.lerp(master, base, 1 - 1 / beta1)


def _read_state(checkpoint: Checkpoint, state: str, heartbeat: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """A state that has the shape of its parameter, of every trained parameter."""
    reader = CheckpointReader(checkpoint)
    parameters: dict[str, Tensor] = {}
    for name, shape in checkpoint.manifest.parameters.items():
        elements = math.prod(shape)
        if elements * _ELEMENT_BYTES > checkpoint.bytes:  # before memory is allocated for them
            reason = f"{name} has the shape {list(shape)}, more than all files of the checkpoint"
            raise CorruptCheckpointError(str(checkpoint.name), reason)
        flat = torch.empty(elements, dtype=torch.float32)
        reader.read(name, state, 0, flat)
        parameters[name] = flat.view(shape)
        heartbeat()
    return parameters


def _digest(checkpoint: Checkpoint, entry: FileEntry) -> str:
    try:
        with (checkpoint.path / entry.name).open("rb", buffering=0) as file:
            return checksum(file)
    except OSError as error:
        raise _read_failure(checkpoint, entry.name, error) from error


class _PinnedBuffer(threading.local):
    """A page-locked host buffer for each thread, for data on its way to a device. Allocated on first use."""

    _buffer: Tensor | None = None

    def __call__(self, elements: int) -> Tensor:
        """The first `elements` elements of the buffer, at most `_CHUNK_ELEMENTS`."""
        if self._buffer is None:
            self._buffer = torch.empty(_CHUNK_ELEMENTS, dtype=torch.float32, pin_memory=True)
        return self._buffer[:elements]


def _read_into(out: Tensor, descriptor: int, position: int, pinned: _PinnedBuffer) -> None:
    """Fill a 1-D fp32 tensor on any device with the bytes of a file from `position` on.

    Raises:
        EOFError: the file is too short.
        OSError: it cannot be read.
    """
    for chunk in torch.split(out, _CHUNK_ELEMENTS):
        host = chunk if chunk.device.type == "cpu" else pinned(chunk.numel())
        elements: Any = host.numpy()
        block = memoryview(elements).cast("B")
        while block:
            count = os.preadv(descriptor, [block], position)
            if count == 0:
                raise EOFError(f"it ends at byte {position}")
            block, position = block[count:], position + count
        if host is not chunk:
            chunk.copy_(host)
