"""Packing keeps every document, fills rows, and is deterministic."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune_trainer.data.rows.documents import TokenizedDocument
from spotune_trainer.data.rows.packing import PackedRow, Packer, padding_share, split_document

lengths = st.lists(st.integers(1, 16), max_size=300)


def document(number: int, length: int) -> TokenizedDocument:
    ids = np.full(length, number, dtype=np.int32)
    return TokenizedDocument(ids, ids, full_length=length, truncated=False)


def pack(sizes: list[int]) -> list[PackedRow]:
    packer = Packer(16)
    rows = [row for number, size in enumerate(sizes) for row in packer.add(document(number, size))]
    return [*rows, *packer.flush()]


@given(lengths)
def test_every_document_is_whole_in_exactly_one_row(sizes: list[int]) -> None:
    rows = pack(sizes)
    assert all(len(row.input_ids) <= 16 for row in rows)
    packed = {
        int(part[0]): len(part)
        for row in rows
        for part in np.split(row.input_ids, np.cumsum(row.lengths)[:-1])
        if len(set(part.tolist())) == 1
    }
    assert packed == dict(enumerate(sizes))


def test_the_share_of_padding_is_that_of_all_micro_batches() -> None:
    sizes = [1, 1, 2, 6]
    widths = [max(micro_batch) for micro_batch in itertools.product(sizes, repeat=3)]
    expected = 1 - statistics.mean(sizes) / statistics.mean(widths)
    assert padding_share(Counter(sizes), 3) == pytest.approx(expected)
    assert padding_share(Counter(sizes), 1) == padding_share(Counter({7: 4}), 8) == pytest.approx(0)


@given(lengths)
def test_packing_the_same_documents_gives_the_same_rows(sizes: list[int]) -> None:
    assert [row.input_ids.tolist() for row in pack(sizes)] == [row.input_ids.tolist() for row in pack(sizes)]


def test_rows_are_at_least_97_percent_full() -> None:
    sizes = np.random.default_rng(0).integers(1, 12, 3000).tolist()
    rows = pack(sizes)
    assert sum(sizes) / (16 * len(rows)) > 0.97


def test_a_long_text_is_split_over_rows_completely() -> None:
    whole = document(0, 37)
    whole.input_ids[:] = np.arange(37)
    pieces = list(split_document(whole, 16))
    assert [len(piece.input_ids) for piece in pieces] == [16, 16, 5]
    assert np.concatenate([piece.input_ids for piece in pieces]).tolist() == list(range(37))
