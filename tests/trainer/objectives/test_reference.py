"""Files of the reference model's log-probabilities, of rows with one pair and of packed rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from spotune_trainer.objectives.reference import ReferenceLogProbs

Counts = npt.NDArray[np.int64]

ROWS = 40
"""Parts of 16 rows, so the last one is smaller."""


def write_all(store: ReferenceLogProbs, counts: Counts) -> npt.NDArray[np.float32]:
    """Write values that count the pairs, ``[pairs, 2]``; returns them."""
    stops = np.cumsum(counts)
    values = np.arange(2 * stops[-1], dtype=np.float32).reshape(-1, 2)
    for part in store.missing():
        rows = slice(store.sample_ids(part).start, store.sample_ids(part).stop)
        store.write(part, values[stops[rows.start] - counts[rows.start] : stops[rows.stop - 1]], counts[rows])
    return values


@pytest.mark.parametrize("counts", [np.ones(ROWS, dtype=np.int64), np.arange(ROWS) % 5 + 1], ids=["pairs", "packed"])
def test_rows_have_the_values_of_their_pairs_in_any_order(tmp_path: Path, counts: Counts) -> None:
    values = write_all(ReferenceLogProbs(tmp_path, ROWS), counts)
    of_rows = np.split(values, np.cumsum(counts)[:-1])
    ids = np.array([39, 0, 17, 16, 15, 0])
    found = ReferenceLogProbs(tmp_path, ROWS)(ids)
    assert found.tolist() == np.concatenate([of_rows[number] for number in ids]).tolist()


def test_files_of_rows_with_one_pair_are_those_of_earlier_versions(tmp_path: Path) -> None:
    values = write_all(ReferenceLogProbs(tmp_path, ROWS), np.ones(ROWS, dtype=np.int64))
    for path in tmp_path.iterdir():
        np.save(tmp_path / "expected.npy", np.load(path))
        assert path.read_bytes() == (tmp_path / "expected.npy").read_bytes()
    assert np.array_equal(np.load(tmp_path / "000001.npy"), values[16:32])


def test_a_part_of_packed_rows_with_one_pair_each_fits_beside_others(tmp_path: Path) -> None:
    counts = np.where(np.arange(ROWS) < 16, 1, 3)
    values = write_all(ReferenceLogProbs(tmp_path, ROWS), counts)
    assert ReferenceLogProbs(tmp_path, ROWS)(np.arange(ROWS)).tolist() == values.tolist()
