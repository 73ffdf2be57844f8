"""Texts and words with labels to token ids.

The words of a row are joined by spaces and tokenized as one text, because at inference the model gets text too. The
first token of a word has its label, as in transformers' run_ner.py; the other tokens have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.documents import Document, TokenizedDocument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], max_length: int
) -> Iterator[TokenizedDocument]:
    """Token ids of texts, as the tokenizer encodes and truncates a text, with the label of each."""
    texts = [document.segments[0].text for document in documents]
    encoded = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    for document, text, whole in zip(documents, texts, encoded, strict=True):
        ids = whole if len(whole) <= max_length else _truncated(tokenizer, text, max_length)
        yield TokenizedDocument(
            np.array(ids, dtype=np.int32),
            np.array(document.labels, dtype=np.int32),
            full_length=len(whole),
            truncated=len(whole) > max_length,
        )


def encode_words(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], max_length: int
) -> Iterator[TokenizedDocument]:
    """Token ids of the words of each document, with the label of a word at its first token."""
    for document in documents:
        ids, full_length, first_tokens = tokenize_words(tokenizer, document.words, max_length)
        labels = np.full(len(ids), NO_LOSS, dtype=np.int32)
        for word, token in first_tokens.items():
            labels[token] = document.labels[word]
        yield TokenizedDocument(
            np.array(ids, dtype=np.int32), labels, full_length=full_length, truncated=full_length > len(ids)
        )


def tokenize_words(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str], max_length: int
) -> tuple[list[int], int, dict[int, int]]:
    """The tokens of words.

    Args:
        tokenizer: A fast one, which knows the characters of each token.
        words: The words; joined by spaces they are the text.
        max_length: Maximum number of tokens.

    Returns:
        Token ids; their number before truncation; and, by the position of each word that is not cut, that of its first
        token.
    """
    text = " ".join(words)
    options: dict[str, Any] = {"return_offsets_mapping": True, "verbose": False}
    encoded = tokenizer(text, **options)
    full_length = len(encoded["input_ids"])
    if full_length > max_length:
        encoded = tokenizer(text, truncation=True, max_length=max_length, **options)
    starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])])
    return encoded["input_ids"], full_length, _first_tokens(np.array(encoded["offset_mapping"]), starts)


def _first_tokens(offsets: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> dict[int, int]:
    """The first token of each word, by the position of the word.

    Args:
        offsets: First character of each token, and the character after its last one, ``[tokens, 2]``; equal for the
            special tokens. A token may begin with the space before its word.
        starts: First character of each word, ``[words]``.
    """
    tokens = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
    words = np.searchsorted(starts, offsets[tokens, 1] - 1, side="right") - 1
    found, first = np.unique(words, return_index=True)
    return dict(zip(found.tolist(), tokens[first].tolist(), strict=True))


def _truncated(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=max_length, verbose=False)["input_ids"]
    return ids
