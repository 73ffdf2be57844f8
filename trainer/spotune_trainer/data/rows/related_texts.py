"""Texts with embeddings: a query, a text that is near to it and, if there is one, a text that is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from spotune.prompting.template import RowError
from spotune_trainer.data.labels.encoding import tokenize_texts
from spotune_trainer.data.rows.documents import Document, Segment, TokenizedDocument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def texts_document(texts: Mapping[str, str], kept: Mapping[str, str]) -> Document:
    """The document of texts with embeddings: one segment each.

    Args:
        texts: by name: query, positive and, if any, negative.
        kept: values of the kept columns.

    Raises:
        RowError: A text is empty.
    """
    empty = next((name for name, text in texts.items() if not text.strip()), None)
    if empty is not None:
        raise RowError(f"{empty} is an empty text: remove the row, or correct it or dataset.{empty}")
    return Document(tuple(Segment(text, True) for text in texts.values()), "", kept)


def tokenize_related_texts(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[TokenizedDocument]:
    """The texts of each row one after the other, each as the tokenizer encodes and truncates it by itself."""
    texts = [segment.text for document in documents for segment in document.segments]
    encoded = tokenize_texts(tokenizer, texts, max_length)
    for document in documents:
        parts = list(islice(encoded, len(document.segments)))
        ids = np.array([token for part in parts for token in part.input_ids], dtype=np.int32)
        full_length = sum(part.full_length for part in parts)
        yield TokenizedDocument(
            ids,
            ids,
            full_length=full_length,
            truncated=full_length > len(ids),
            pair_lengths=np.array([len(part.input_ids) for part in parts], dtype=np.int32),
            longest=max(part.full_length for part in parts),
            cut_loss_tokens=full_length - len(ids),
        )
