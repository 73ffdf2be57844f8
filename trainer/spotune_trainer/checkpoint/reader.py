"""Read fragments back: any range of any parameter, whoever wrote it, with the checksums verified.

A reader maps every rank's file and copies the ranges it is asked for. Files are verified whole (XXH3-64, memory
speed), shared out over the ranks of the reading group so that each byte is hashed once.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from spotune.errors import SpotuneError
from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.layout import Checkpoint, FileEntry

_HASH_BLOCK_BYTES = 16 << 20


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
    """One tensor within a rank's file: elements [offset, offset + data.size) of a parameter."""

    offset: int
    data: npt.NDArray[np.float32]


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
            for parameter, offset, state, data in self._map(checkpoint.path / entry.name):
                self._runs[parameter, state].append(_Run(offset, data))

    def read(self, parameter: str, state: str, offset: int, out: Tensor) -> None:
        """Copy elements [offset, offset + out.numel()) of a parameter's state into the 1-D fp32 tensor `out`.

        Raises:
            CorruptCheckpointError: the files together do not cover that range.
        """
        missing = out.numel()
        for run in self._runs.get((parameter, state), ()):
            start = max(offset, run.offset)
            end = min(offset + out.numel(), run.offset + run.data.size)
            if start < end:
                # A copy of its own: a mapped file is read-only, and torch wants memory it may write.
                part = torch.from_numpy(run.data[start - run.offset : end - run.offset].copy())
                out[start - offset : end - offset].copy_(part)
                missing -= end - start
        if missing != 0:
            raise CorruptCheckpointError(
                str(self.checkpoint.name),
                f"{missing} of {out.numel()} elements of {parameter} ({state}) from {offset} are in no file",
            )

    def restore(self, fragments: Iterable[Fragment]) -> None:
        """Fill the fragments' states in place."""
        for fragment in fragments:
            for state in STATES:
                self.read(fragment.parameter, state, fragment.offset, fragment.states[state])

    def _map(self, path: Path) -> Iterator[tuple[str, int, str, npt.NDArray[np.float32]]]:
        try:
            with path.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header: dict[str, Any] = json.loads(stream.read(length))
            if not header:
                return
            data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
        except (OSError, ValueError, struct.error) as error:
            raise CorruptCheckpointError(str(self.checkpoint.name), f"{path.name} cannot be read: {error}") from error
        for name, value in header.items():
            parameter, offset, state = name.rsplit("|", 2)
            start, end = value["data_offsets"]
            yield parameter, int(offset), state, data[start:end].view(np.float32)


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
