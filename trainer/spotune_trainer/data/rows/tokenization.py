"""Documents to token ids and labels.

Only text that the model has to generate carries loss; prompts carry none. Each segment of a prompt with its completion
is tokenized on its own, because at inference the model also gets the prompt's tokens alone. A chat is tokenized whole,
as at inference, and divided only where a token would lie in two segments. A completion ends with the end-of-text token
(EOS).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from spotune.prompting.encoding import encode_prompts, truncate_prompt
from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.labels.encoding import EncodedText, tokenize_texts, tokenize_word_list
from spotune_trainer.data.rows.documents import Document, Segment, TokenizedDocument
from spotune_trainer.data.rows.labelled_answers import join_mismatched
from spotune_trainer.data.rows.pairs import join_pairs
from spotune_trainer.data.rows.related_texts import tokenize_related_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from spotune_trainer.data.rows.options import TextOptions


class DocumentTokenizer:
    """Tokenizes documents and sets their labels.

    Args:
        options: The task and the maximum lengths.
        tokenizer: Needs an end-of-text token (EOS), which ends every completion, unless rows are texts with labels or
            with embeddings.

    Raises:
        ValueError: The tokenizer has no end-of-text token, or cannot tell which token belongs to which word.
    """

    def __init__(self, options: TextOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        if options.label_each_word and not tokenizer.is_fast:
            raise ValueError("labels of words need a fast tokenizer, which knows the characters of its tokens")
        if tokenizer.eos_token_id is None and not (options.has_labelled_texts or options.query):
            raise ValueError(
                "the tokenizer has no end-of-text token (eos_token), so the model could not learn to end an answer"
            )
        self._options = options
        self._tokenizer = tokenizer
        self._eos_token_id = tokenizer.eos_token_id

    def tokenize(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        """Token ids and labels of each document, in order, truncated to the options' maximum lengths.

        With packing, plain text is not truncated: ``packing.split_document`` splits it later.
        """
        if self._options.has_labelled_texts:
            return self._labelled(documents)
        if self._options.chosen:
            answers = [answer for pair in documents for answer in (pair, pair.rejected) if answer is not None]
            return join_pairs(self._causal(answers))
        if documents and all(document.mismatched is not None for document in documents):
            both = [each for own in documents for each in (own, own.mismatched) if each is not None]
            return join_mismatched(self._causal(both))
        if self._options.query:
            return tokenize_related_texts(documents, self._tokenizer, self._options.max_length)
        return self._seq2seq(documents) if self._options.task == "seq2seq" else self._causal(documents)

    def count_turn_tokens(self, documents: Sequence[Document]) -> list[Counter[str]]:
        """Tokens of the answers of each chat that are not trained on, by outcome: of what the row says in them."""
        texts = [text for document in documents for _, text in document.turns_left_out]
        texts = [text.encode(errors="replace").decode() for text in texts]  # a text that is not rendered is not checked
        sizes = iter(map(len, self._encode_plain(texts)))
        found = []
        for document in documents:
            counts: Counter[str] = Counter()
            for outcome, _ in document.turns_left_out:
                counts[outcome] += next(sizes)
            found.append(counts)
        return found

    def _labelled(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        """Texts with their label, or with the label of each word at its first token, as in transformers' run_ner.py."""
        max_length = self._options.max_length
        encoded: Iterator[EncodedText]
        if self._options.label_each_word:
            encoded = (tokenize_word_list(self._tokenizer, document.word_list, max_length) for document in documents)
        else:
            encoded = tokenize_texts(self._tokenizer, [document.segments[0].text for document in documents], max_length)
        for document, text in zip(documents, encoded, strict=True):
            labels, cut = np.array(document.labels, dtype=np.int32), 0
            if self._options.label_each_word:
                cut = len(labels) - len(text.first_tokens) if text.full_length > len(text.input_ids) else 0
                labels = np.full(len(text.input_ids), NO_LOSS, dtype=np.int32)
                for word, token in text.first_tokens.items():
                    labels[token] = document.labels[word]
            yield TokenizedDocument(
                np.array(text.input_ids, dtype=np.int32),
                labels,
                full_length=text.full_length,
                truncated=text.full_length > len(text.input_ids),
                cut_loss_tokens=cut,
            )

    def _seq2seq(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        prompts = encode_prompts(self._tokenizer, "seq2seq", [document.segments[0].text for document in documents])
        targets = self._tokenizer(text_target=[document.segments[1].text for document in documents], verbose=False)[
            "input_ids"
        ]
        max_target_length = self._options.max_completion_length or self._options.max_length
        for prompt, target in zip(prompts, targets, strict=True):
            ids = truncate_prompt(prompt, self._options.max_length, self._eos_token_id)
            labels = self._with_eos(target)
            yield TokenizedDocument(
                input_ids=np.array(ids, dtype=np.int32),
                labels=np.array(labels[:max_target_length], dtype=np.int32),
                full_length=len(prompt),
                truncated=len(prompt) > len(ids) or len(labels) > max_target_length,
                cut_loss_tokens=max(len(labels) - max_target_length, 0),
            )

    def _causal(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        is_chat = self._options.is_chat
        encoded = self._encode_chats(documents) if is_chat else self._encode_segments(documents)
        for document, pieces in zip(documents, encoded, strict=True):
            if document.segments[-1].has_loss and not (is_chat and self._eos_token_id in pieces[-1]):
                pieces[-1] = self._with_eos(pieces[-1])
            ids = np.array([token for piece in pieces for token in piece], dtype=np.int32)
            sizes = [len(piece) for piece in pieces]
            has_loss = np.repeat([segment.has_loss for segment in document.segments], sizes)
            max_length = len(ids) if self._options.text and self._options.packing else self._options.max_length
            labels = np.where(has_loss, ids, np.int32(NO_LOSS))[:max_length]
            yield TokenizedDocument(
                ids[:max_length],
                labels,
                full_length=len(ids),
                truncated=len(ids) > max_length,
                cut_turns=_count_cut_turns(document.segments, sizes, max_length),
                cut_loss_tokens=int(np.count_nonzero(has_loss[max_length:])),
            )

    def _encode_segments(self, documents: Sequence[Document]) -> Iterator[list[list[int]]]:
        """Token ids of each segment. The first has the special tokens that the tokenizer adds, those after it none."""
        first_ids = encode_prompts(self._tokenizer, "causal", [document.segments[0].text for document in documents])
        later_ids = iter(self._encode_plain([s.text for document in documents for s in document.segments[1:]]))
        for document, first in zip(documents, first_ids, strict=True):
            yield [first, *(next(later_ids) for _ in document.segments[1:])]

    def _encode_chats(self, documents: Sequence[Document]) -> Iterator[list[list[int]]]:
        """Token ids of each segment. A chat template writes special tokens such as BOS itself.

        The ids are those of the whole text, which the model also gets at inference. Some tokenizers give a text other
        ids if it is divided: SentencePiece puts a space before every text.
        """
        if not documents:
            return
        texts = ["".join(segment.text for segment in document.segments) for document in documents]
        fast = self._tokenizer.is_fast
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        offsets = encoded["offset_mapping"] if fast else [[]] * len(texts)
        for document, whole, places in zip(documents, encoded["input_ids"], offsets, strict=True):
            yield _split_at_offsets(document.segments, whole, places) or self._divide(document.segments, whole)

    def _divide(self, segments: Sequence[Segment], whole: list[int]) -> list[list[int]]:
        """Token ids of each segment: those of the whole text, divided only where a token lies in two segments.

        Args:
            segments: The segments.
            whole: Token ids of the segments' whole text.
        """
        pieces: list[list[int]] = []
        text, ids, taken = "", whole, 0  # since the last division: the text so far, all token ids, ids in pieces
        for number, segment in enumerate(segments):
            text += segment.text
            before = self._encode_plain([text])[0] if number + 1 < len(segments) else ids
            if ids[: len(before)] == before:
                pieces.append(ids[taken : len(before)])
                taken = len(before)
            else:
                pieces.append(before[taken:])
                text, taken = "", 0
                ids = self._encode_plain(["".join(later.text for later in segments[number + 1 :])])[0]
        return pieces

    def _encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids without any special tokens."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _with_eos(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] == self._eos_token_id else [*ids, self._eos_token_id]


def _split_at_offsets(
    segments: Sequence[Segment], ids: list[int], offsets: Sequence[tuple[int, int]]
) -> list[list[int]] | None:
    """Token ids of each segment; None if the offsets do not show where each segment ends.

    Args:
        segments: The segments.
        ids: Token ids of the segments' whole text.
        offsets: First character of each token, and the character after its last one.
    """
    if not offsets:
        return None
    starts, stops_of_tokens = np.array(offsets).T
    stops = np.cumsum([len(segment.text) for segment in segments])[:-1]
    cuts = np.searchsorted(stops_of_tokens, stops, side="right")  # the first token that ends after a segment
    if np.any(np.append(starts, stops[-1:])[cuts] != stops) or np.any(np.append(0, stops_of_tokens)[cuts] != stops):
        return None  # a token lies in two segments, or a gap, since some tokenizers leave spaces out of offsets
    bounds = [0, *cuts.tolist(), len(ids)]
    return [ids[start:stop] for start, stop in pairwise(bounds)]


def _count_cut_turns(segments: Sequence[Segment], sizes: Sequence[int], max_length: int) -> int:
    """Turns with loss whose tokens all lie beyond the maximum length."""
    starts = np.cumsum([0, *sizes])
    turns: dict[int, bool] = {}
    for segment, start in zip(segments, starts, strict=False):
        if segment.has_loss and segment.turn is not None:
            turns[segment.turn] = turns.get(segment.turn, True) and bool(start >= max_length)
    return sum(turns.values())
