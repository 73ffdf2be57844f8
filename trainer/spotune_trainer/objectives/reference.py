"""Log-probabilities of pairs by the reference model: computed once, before the first step, and kept in files.

So training holds one model in memory, and a run that is resumed uses the same values. A file has the pairs of
consecutive sample ids, which are rows: of packed rows, the number of pairs of each row follows. It is written once, by
any rank of any worker group, and renamed when it is complete.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spotune_trainer import files

PairLookup = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]
"""Log-probabilities of the chosen and of the rejected answer, ``[pairs, 2]``, of all pairs of these rows in order."""

_PARTS: Final = 256
_SMALLEST_PART: Final = 16
"""Rows. A kill loses the part of each rank; small parts would be too many files."""


class ReferenceLogProbs:
    """The log-probabilities of all pairs of a dataset.

    Args:
        folder: of the files.
        num_samples: rows of the dataset.
    """

    def __init__(self, folder: Path, num_samples: int) -> None:
        self._folder = folder
        self._num_samples = num_samples
        self._part_size = max(_SMALLEST_PART, math.ceil(num_samples / _PARTS))
        self._values: npt.NDArray[np.float32] | None = None
        self._stops = np.zeros(0, dtype=np.int64)

    @property
    def num_parts(self) -> int:
        """Number of files."""
        return math.ceil(self._num_samples / self._part_size)

    def missing(self) -> list[int]:
        """Numbers of the parts that have no file yet, ascending."""
        return [part for part in range(self.num_parts) if not self._path(part).exists()]

    def sample_ids(self, part: int) -> range:
        """Sample ids of a part."""
        return range(part * self._part_size, min((part + 1) * self._part_size, self._num_samples))

    def write(self, part: int, values: npt.NDArray[np.float32], pairs: npt.NDArray[np.int64]) -> None:
        """Write a part; durable when this returns.

        Args:
            part: its number.
            values: ``[pairs, 2]``.
            pairs: number of pairs of each row, ``[rows]``.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.save(content, values.astype(np.float32))
        if len(values) > len(pairs):
            np.save(content, pairs)
        files.write_bytes(self._path(part), content.getvalue())

    def __call__(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Log-probabilities of the answers of all pairs of these rows, ``[pairs, 2]``. All parts must exist."""
        if self._values is None:
            values, counts = zip(*map(self._read, range(self.num_parts)), strict=True)
            self._stops = np.cumsum(np.concatenate(counts))
            self._values = np.concatenate(values)
        stops = self._stops[sample_ids]
        starts = np.where(sample_ids > 0, self._stops[sample_ids - 1], 0)
        found: npt.NDArray[np.float32] = self._values[
            np.concatenate([np.arange(*bounds) for bounds in zip(starts, stops, strict=True)])
        ]
        return found

    def _read(self, part: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Values of a part, ``[pairs, 2]``, and the number of pairs of each of its rows."""
        content = io.BytesIO(self._path(part).read_bytes())
        values = np.load(content)
        rows = len(self.sample_ids(part))
        return values, np.ones(rows, dtype=np.int64) if len(values) == rows else np.load(content)

    def _path(self, part: int) -> Path:
        return self._folder / f"{part:06d}.npy"


def reference_folder(root: Path, model: dict[str, Any], index_hash: str) -> Path:
    """Folder of the log-probabilities for a model's source and a dataset.

    Until the first checkpoint both may still change. Each combination has a folder of its own.
    """
    return root / files.content_key({"model": model, "index": index_hash})
