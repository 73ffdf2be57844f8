"""Several short documents in one row, so that few of a row's tokens are padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from spotune_trainer.data.tokenization import TokenArray, TokenisedDocument

_ROWS_OPEN = 64  # more fill rows better and mix documents from further apart


@dataclass
class PackedRow:
    """Documents that share a row."""

    documents: list[TokenisedDocument] = field(default_factory=list)

    @property
    def input_ids(self) -> TokenArray:
        """Tokens of all documents, one after the other: ``[tokens]``."""
        return np.concatenate([document.input_ids for document in self.documents])

    @property
    def labels(self) -> TokenArray:
        """Labels of all documents: ``[tokens]``."""
        return np.concatenate([document.labels for document in self.documents])

    @property
    def lengths(self) -> TokenArray:
        """Tokens of each document: ``[documents]``."""
        return np.array([len(document.input_ids) for document in self.documents], dtype=np.int32)


class Packer:
    """Best fit with a bounded number of open rows: a document goes into the fullest open row that it fits into.

    The result depends on the documents and their order alone.
    """

    def __init__(self, row_length: int) -> None:
        self._row_length = row_length
        self._open: list[tuple[int, int]] = []  # (tokens free, number of the row), ascending
        self._rows: dict[int, PackedRow] = {}
        self._started = 0

    def add(self, document: TokenisedDocument) -> Iterator[PackedRow]:
        """Place a document of at most the row's length; yields a row that became full or had to make room."""
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
        if self._open[0][0] == 0 or len(self._open) > _ROWS_OPEN:
            yield self._rows.pop(self._open.pop(0)[1])

    def rest(self) -> Iterator[PackedRow]:
        """The rows that are still open, in the order in which they were begun."""
        yield from self._rows.values()
        self._rows, self._open = {}, []


def split_document(document: TokenisedDocument, row_length: int) -> Iterator[TokenisedDocument]:
    """Cut a long plain text into pieces of a row each, instead of losing what does not fit."""
    for begin in range(0, len(document.input_ids), row_length):
        ids, labels = document.input_ids[begin : begin + row_length], document.labels[begin : begin + row_length]
        yield TokenisedDocument(ids, labels, full_length=document.full_length, truncated=False)
