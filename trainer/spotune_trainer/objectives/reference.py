"""Log-probabilities of pairs by the reference model: computed once, before the first step, and kept in files.

So training holds one model in memory, and a run that is resumed uses the same values. A file has the pairs of
consecutive sample ids. It is written once, by any rank of any worker group, and renamed when it is complete.
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
"""Log-probabilities of the chosen and of the rejected answer, ``[ids, 2]``, of the pairs with these sample ids."""

_PARTS: Final = 256
_SMALLEST_PART: Final = 16
"""Pairs. A kill loses the part of each rank; small parts would be too many files."""


class ReferenceLogProbs:
    """The log-probabilities of all pairs of a dataset.

    Args:
        folder: of the files.
        num_samples: pairs of the dataset.
    """

    def __init__(self, folder: Path, num_samples: int) -> None:
        self._folder = folder
        self._num_samples = num_samples
        self._part_size = max(_SMALLEST_PART, math.ceil(num_samples / _PARTS))
        self._values: npt.NDArray[np.float32] | None = None

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

    def write(self, part: int, values: npt.NDArray[np.float32]) -> None:
        """Write a part, ``[pairs, 2]``; durable when this returns."""
        self._folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.save(content, values.astype(np.float32))
        files.write_bytes(self._path(part), content.getvalue())

    def __call__(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Log-probabilities of the chosen and of the rejected answer, ``[ids, 2]``. All parts must exist."""
        if self._values is None:
            self._values = np.concatenate([np.load(self._path(part)) for part in range(self.num_parts)])
        chosen: npt.NDArray[np.float32] = self._values[sample_ids]
        return chosen

    def _path(self, part: int) -> Path:
        return self._folder / f"{part:06d}.npy"


def reference_folder(root: Path, model: dict[str, Any], index_hash: str) -> Path:
    """Folder of the log-probabilities for a model's source and a dataset.

    Until the first checkpoint both may still change. Each combination has a folder of its own.
    """
    return root / files.content_key({"model": model, "index": index_hash})
