"""What a raw row becomes: a document of text segments, then token ids with labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spotune_trainer.data.chat.messages import Chat, message_text
from spotune_trainer.data.chat.renderer import TrainedChat, TurnOutcome

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Segment:
    """A piece of a document's text; the model is trained to generate it only if it has loss.

    Attributes:
        text: The text.
        has_loss: Whether the model is trained to generate it.
        turn: Index of the chat message that it belongs to; None for other text.
    """

    text: str
    has_loss: bool
    turn: int | None = None


@dataclass(frozen=True)
class Document:
    """A rendered row.

    Attributes:
        segments: The text, in order.
        completion: The reference answer for evaluation; empty for plain text.
        kept: Values of the kept columns, as text.
        chat: What of a chat is trained on; None for other formats.
        rejected: Of a pair, the document with the rejected answer; this one then has the chosen answer.
        labels: Position in ``dataset.labels`` of the text's label, or of each word's; empty for other formats.
        word_list: Words, each with a label; empty for other formats.
        desirable: Whether the answer is desirable; None if answers have no label.
        mismatched: Of a labelled answer, its prompt with the answer of another row, see `with_mismatched`.
        turns_left_out: Of a chat, the outcome and the text of each answer that is not trained on.
    """

    segments: tuple[Segment, ...]
    completion: str
    kept: Mapping[str, str]
    chat: TrainedChat | None = None
    rejected: Document | None = None
    labels: tuple[int, ...] = ()
    word_list: tuple[str, ...] = ()
    desirable: bool | None = None
    mismatched: Document | None = None
    turns_left_out: tuple[tuple[TurnOutcome, str], ...] = ()

    @property
    def dedup_key(self) -> bytes:
        """UTF-8 bytes that are equal for duplicates, so that duplicates go into the same split."""
        if self.rejected is not None:
            return b"\x1f".join((dataclasses.replace(self, rejected=None).dedup_key, self.rejected.dedup_key))
        if self.chat is not None:
            return self.chat.text.encode()
        return "\x1e".join(segment.text for segment in self.segments).encode()


@dataclass(frozen=True)
class TokenizedDocument:
    """Token ids and labels of one document, or of two that share a row.

    These are the documents of a pair, the chosen one first, or a labelled answer's document and its mismatched one.

    Attributes:
        input_ids: ``[tokens]``.
        labels: Causal ``[tokens]``, seq2seq ``[target tokens]``; -100 where there is no loss. Of a text with a label
            its position in ``dataset.labels``, ``[1]``; of words ``[tokens]``, with that of each at its first token.
        full_length: Input tokens before truncation.
        truncated: Whether the input or the target was truncated.
        cut_turns: Trained turns of a chat that lie wholly beyond the maximum length.
        cut_loss_tokens: Labels with loss beyond the maximum length; of words those whose label is cut.
        pair_lengths: Of two documents, or of the texts of a row with embeddings, the tokens of each; None for one.
        longest: Of several documents, input tokens, before truncation, of the longest one, or of a labelled answer's
            one; 0 for one document.
    """

    input_ids: TokenArray
    labels: TokenArray
    full_length: int
    truncated: bool
    cut_turns: int = 0
    pair_lengths: TokenArray | None = None
    longest: int = 0
    cut_loss_tokens: int = 0

    @property
    def limited_length(self) -> int:
        """Input tokens, before truncation, of what the maximum length limits: the document, or the longer of a pair."""
        return self.longest or self.full_length


def chat_document(chat: Chat, trained: TrainedChat, kept: Mapping[str, str]) -> Document:
    """A rendered chat as a document: what is trained on in segments of its own.

    Args:
        chat: The chat of the row.
        trained: The same, rendered.
        kept: Values of the kept columns.
    """
    segments: list[Segment] = []
    position = 0  # of the first character that is in no segment yet
    for span in trained.spans:
        if position < span.start or not segments:  # the tokenizer's own special tokens belong to the first segment
            segments.append(Segment(trained.text[position : span.start], False))
        segments.append(Segment(trained.text[span.start : span.end], True, span.turn))
        position = span.end
    if position < len(trained.text) or not segments:
        segments.append(Segment(trained.text[position:], False))
    left_out = tuple(
        (outcome, message_text(chat.messages[turn]))
        for turn, outcome in trained.outcomes.items()
        if outcome != "trained"
    )
    return Document(tuple(segments), trained.answer, kept, trained, turns_left_out=left_out)
