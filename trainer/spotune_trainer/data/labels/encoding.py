"""Texts, and lists of words, to token ids.

Words are joined by spaces and tokenized as one text, because at inference the model gets text too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text.

    Attributes:
        input_ids: Token ids, at most as many as the maximum length.
        full_length: Number of tokens before truncation.
        first_tokens: Of a list of words: by the position of each word that is not cut, that of its first token.
    """

    input_ids: list[int]
    full_length: int
    first_tokens: dict[int, int]


def tokenize_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int) -> Iterator[EncodedText]:
    """The tokens of each text, with special tokens, and truncated as the tokenizer truncates a text."""
    encoded = tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
    for text, whole in zip(texts, encoded, strict=True):
        ids: list[int] = whole
        if len(whole) > max_length:
            ids = tokenizer(text, truncation=True, max_length=max_length, verbose=False)["input_ids"]
        yield EncodedText(ids, len(whole), {})


def tokenize_word_list(tokenizer: PreTrainedTokenizerBase, word_list: Sequence[str], max_length: int) -> EncodedText:
    """The tokens of words.

    Args:
        tokenizer: A fast one, which knows the characters of each token.
        word_list: The words; joined by spaces they are the text.
        max_length: Maximum number of tokens.
    """
    text = " ".join(word_list)
    options: dict[str, Any] = {"return_offsets_mapping": True, "verbose": False}
    encoded = tokenizer(text, **options)
    full_length = len(encoded["input_ids"])
    if full_length > max_length:
        encoded = tokenizer(text, truncation=True, max_length=max_length, **options)
    starts = np.cumsum([0, *(len(word) + 1 for word in word_list[:-1])])
    return EncodedText(encoded["input_ids"], full_length, _first_tokens(np.array(encoded["offset_mapping"]), starts))


def _first_tokens(offsets: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> dict[int, int]:
    """The first token of each word, by the position of the word.

    Args:
        offsets: First character of each token, and the character after its last one, ``[tokens, 2]``; equal for the
            special tokens. A token may begin with the space before its word.
        starts: First character of each word, ``[words]``.
    """
    tokens = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
    positions = np.searchsorted(starts, offsets[tokens, 1] - 1, side="right") - 1
    found, first = np.unique(positions, return_index=True)
    return dict(zip(found.tolist(), tokens[first].tolist(), strict=True))
