"""Sequence packing: several short documents, or pairs of answers, in one row, so that few of its tokens are padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from spotune_trainer.data.rows.documents import TokenArray, TokenizedDocument

_MAX_OPEN_ROWS = 64  # a higher limit fills rows better, but mixes documents that are further apart in the input


@dataclass
class PackedRow:
    """Documents that share a row."""

    documents: list[TokenizedDocument] = field(default_factory=list)

    @property
    def input_ids(self) -> TokenArray:
        """Tokens of all documents, concatenated: ``[tokens]``."""
        return np.concatenate([document.input_ids for document in self.documents])

    @property
    def labels(self) -> TokenArray:
        """Labels of all documents, concatenated: ``[tokens]``."""
        return np.concatenate([document.labels for document in self.documents])

    @property
    def lengths(self) -> TokenArray:
        """Tokens of each document: ``[documents]``."""
        return np.array([len(document.input_ids) for document in self.documents], dtype=np.int32)

    @property
    def pair_lengths(self) -> TokenArray:
        """Of pairs, tokens of the chosen and of the rejected document of each, one after the other: ``[2 * pairs]``."""
        lengths = [document.pair_lengths for document in self.documents if document.pair_lengths is not None]
        return np.concatenate(lengths)


class Packer:
    """Packs documents by best fit: each goes into the fullest open row that has space for it.

    At most 64 rows are open. The result depends only on the documents and their order.

    Args:
        row_length: Maximum tokens per row.
    """

    def __init__(self, row_length: int) -> None:
        self._row_length = row_length
        self._open: list[tuple[int, int]] = []  # (free tokens, number of the row), ascending
        self._rows: dict[int, PackedRow] = {}
        self._started = 0

    def add(self, document: TokenizedDocument) -> Iterator[PackedRow]:
        """Pack a document of at most ``row_length`` tokens; yields the row that this completes, if any.

        A row is complete when it is full, or when it is the fullest and too many rows are open.
        """
        size = len(document.input_ids)
        position = bisect_left(self._open, (size, -1))
        if position < len(self._open):
            free, number = self._open.pop(position)
        else:
            free, number = self._row_length, self._started
            self._started += 1
            self._rows[number] = PackedRow()
        self._rows[number].documents.append(document)
        insort(self._open, (free - size, number))
        if self._open[0][0] == 0 or len(self._open) > _MAX_OPEN_ROWS:
            yield self._rows.pop(self._open.pop(0)[1])

    def flush(self) -> Iterator[PackedRow]:
        """Yield the rows that are still open, in the order in which they were started."""
        yield from self._rows.values()
        self._rows, self._open = {}, []


def padding_share(lengths: Counter[int], micro_batch_size: int) -> float:
    """Expected fraction of padding in micro-batches of random rows, each padded to the longest of its micro-batch.

    Args:
        lengths: Number of rows by their tokens.
        micro_batch_size: Rows of a micro-batch.
    """
    rows, tokens = lengths.total(), sum(length * count for length, count in lengths.items())
    expected_width, not_longer = 0.0, 0
    for length in sorted(lengths):
        shorter, not_longer = not_longer, not_longer + lengths[length]
        expected_width += length * ((not_longer / rows) ** micro_batch_size - (shorter / rows) ** micro_batch_size)
    return 1 - tokens / rows / expected_width


def split_document(document: TokenizedDocument, row_length: int) -> Iterator[TokenizedDocument]:
    """Split a long plain text into documents of at most ``row_length`` tokens, instead of truncating it."""
    for start in range(0, len(document.input_ids), row_length):
        ids, labels = document.input_ids[start : start + row_length], document.labels[start : start + row_length]
        yield TokenizedDocument(ids, labels, full_length=document.full_length, truncated=False)
