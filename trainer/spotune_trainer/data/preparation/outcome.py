"""What of a tokenized row is written to shards, and why the rest is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.counts.left_out import LOST_TURNS, RowReason, count_left_out, explain_row
from spotune_trainer.data.rows.documents import Document, TokenizedDocument
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.packing import split_document
from spotune_trainer.data.rows.pairs import split_pair, teaches


@dataclass(frozen=True)
class RowOutcome:
    """What becomes of a row.

    Attributes:
        pieces: What is written: of a long text that is packed, several rows. Nothing if the row is left out.
        reason: Why the row is left out; None if it is not.
        problems: The reason of everything that is left out although the job asks for it: turns, or the row.
        left_out: The same, counted by reason; see `count_left_out`.
    """

    pieces: Sequence[TokenizedDocument]
    reason: RowReason | None
    problems: Sequence[str]
    left_out: Counter[str]


def outcome_of(document: Document, tokens: TokenizedDocument, text: TextOptions) -> RowOutcome:
    """What becomes of a row.

    Args:
        document: The rendered row.
        tokens: Its tokens.
        text: How rows become text and tokens.
    """
    pieces = [piece for piece in _pieces(tokens, text) if loss_tokens(piece, text)]
    reason = None if pieces else _reason(document, tokens)
    problems = list(document.chat.problems) if document.chat is not None else []
    if reason is not None and reason != "turns":
        problems.append(explain_row(reason, tokens.limited_length, text.max_length))
    if not problems:  # most rows
        return RowOutcome(pieces, None, (), Counter())
    turns = Counter[str](document.chat.outcomes.values()) if document.chat is not None else Counter[str]()
    return RowOutcome(pieces, reason, problems, count_left_out(turns, {reason: 1} if reason is not None else {}))


def loss_tokens(tokens: TokenizedDocument, text: TextOptions) -> int:
    """Labels of a row that carry loss."""
    if text.has_labelled_answers:
        tokens = split_pair(tokens)[0]  # nothing is learned from the mismatched document
    # The first token of a causal document is not predicted, because no token precedes it.
    labels = tokens.labels if text.task == "seq2seq" or text.has_labelled_texts else tokens.labels[1:]
    return int((labels != NO_LOSS).sum())


def _pieces(tokens: TokenizedDocument, text: TextOptions) -> Iterator[TokenizedDocument]:
    if text.has_labelled_answers or text.query:
        return iter([tokens])
    if tokens.pair_lengths is not None:
        return iter([tokens] if teaches(tokens) else [])
    if text.task == "seq2seq" or text.has_labelled_texts:
        return iter([tokens])
    return split_document(tokens, text.max_length)


def _reason(document: Document, tokens: TokenizedDocument) -> RowReason:
    """Why nothing of a row is written."""
    if document.chat is not None:
        outcomes = set(document.chat.outcomes.values())
        if outcomes.intersection(LOST_TURNS):
            return "turns"
        if "trained" not in outcomes:
            return "flagged"
    if tokens.pair_lengths is not None and all(np.any(each.labels != NO_LOSS) for each in split_pair(tokens)):
        return "equal"
    return "cut" if tokens.truncated else "empty"
