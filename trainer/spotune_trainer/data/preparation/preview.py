"""One raw row as the model will see it: its tokens in spans, with or without loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotune.errors import JobError, UsageError
from spotune.prompting.template import RowError
from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.chat.renderer import TurnOutcome
from spotune_trainer.data.preparation.inputs import RawInput, rows_in_order
from spotune_trainer.data.preparation.outcome import outcome_of
from spotune_trainer.data.preparation.readers import RawRow
from spotune_trainer.data.rows.documents import TokenizedDocument
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.pairs import split_pair
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Span:
    """Consecutive tokens, all with or all without loss, and their text."""

    text: str
    tokens: int
    trained: bool


@dataclass(frozen=True)
class RowPreview:
    """A row as the model will see it.

    Attributes:
        location: File and line.
        spans: The input, up to the maximum length. Of a seq2seq model the input, then the target. Of a pair the prompt
            with the chosen answer. Empty for texts with embeddings.
        rejected_spans: Of a pair, the prompt with the rejected answer; empty for others.
        labels: The label of the text, or of each word; empty for others.
        texts: Of texts with embeddings, each by its name, such as ``query``; empty for others.
        desirable: Of an answer with a label, whether it is desirable; None for others.
        tokens: Tokens of the spans.
        trained_tokens: Those of them with loss.
        cut_tokens: Tokens beyond the maximum length.
        turns: For each assistant message of a chat, numbered from 1, what becomes of it.
        problems: Why turns, or the whole row, are left out although the job asks for them.
    """

    location: str
    spans: tuple[Span, ...]
    tokens: int
    trained_tokens: int
    cut_tokens: int
    turns: dict[int, TurnOutcome]
    problems: tuple[str, ...]
    rejected_spans: tuple[Span, ...] = ()
    labels: tuple[str, ...] = ()
    texts: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    desirable: bool | None = None


def preview_row(
    inputs: Sequence[RawInput], number: int, options: TextOptions, tokenizer: PreTrainedTokenizerBase
) -> RowPreview:
    """The row ``number``, from 1, of all inputs in order.

    Raises:
        UsageError: There are fewer rows.
        JobError: A file or the row is wrong, or the options contradict each other. The message names file and line.
    """
    try:
        renderer, encoder = RowRenderer(options, tokenizer), DocumentTokenizer(options, tokenizer)
    except ValueError as error:
        raise JobError(f"spec.dataset: {error}") from error
    location, row = _find_row(inputs, number, renderer)
    try:
        document = renderer.render(row)
    except RowError as error:
        raise JobError(f"{location}: {error}") from error
    (encoded,) = encoder.tokenize([document])
    documents = [tuple(_spans(_tokens(each, options), tokenizer)) for each in split_pair(encoded)]
    chat = document.chat
    return RowPreview(
        location=location,
        spans=() if options.query else documents[0],
        tokens=sum(span.tokens for each in documents for span in each),
        trained_tokens=sum(span.tokens for each in documents for span in each if span.trained),
        cut_tokens=encoded.full_length - len(encoded.input_ids),
        turns={turn + 1: outcome for turn, outcome in chat.outcomes.items()} if chat else {},
        problems=tuple(outcome_of(document, encoded, options).problems),
        rejected_spans=documents[1] if options.chosen else (),
        labels=tuple(options.labels[position] for position in document.labels),
        texts=dict(zip(("query", "positive", "negative"), documents, strict=False)) if options.query else {},
        desirable=document.desirable,
    )


def _tokens(encoded: TokenizedDocument, options: TextOptions) -> list[tuple[int, bool]]:
    """All tokens of a document, of a seq2seq model those of the target too, and whether each is trained on."""
    ids, labels = encoded.input_ids.tolist(), encoded.labels.tolist()
    if options.task == "seq2seq":
        return [(token, False) for token in ids] + [(token, True) for token in labels]
    if options.has_labelled_texts and not options.label_each_word:
        return [(token, False) for token in ids]
    return [(token, label != NO_LOSS) for token, label in zip(ids, labels, strict=True)]


def _find_row(inputs: Sequence[RawInput], number: int, renderer: RowRenderer) -> tuple[str, RawRow]:
    found = 0
    for file_range, line, row in rows_in_order(inputs, renderer.columns):
        found += 1
        if found == number:
            return file_range.location(line), row
    raise UsageError(f"there is no row {number}: the input has {found:,} rows")


def _spans(tokens: Sequence[tuple[int, bool]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Span]:
    start = 0
    for position in range(1, len(tokens) + 1):
        if position == len(tokens) or tokens[position][1] != tokens[start][1]:
            ids = [token for token, _ in tokens[start:position]]
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield Span(str(text), len(ids), tokens[start][1])
            start = position
