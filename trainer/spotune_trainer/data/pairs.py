"""Documents that share a row.

Pairs are a chosen and a rejected answer to the same prompt. Labelled answers, which are desirable or not, share their
row with a mismatched document: the same prompt with the answer of another row. KTO estimates from these how far the
model is from its reference (Ethayarajh et al. 2024, section 4.1). They are fixed when shards are written, so the
reference model's log-probabilities of them can be computed once.

Texts with embeddings are a query, a text that is near to it and, if there is one, a text that is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from spotune.prompting.template import RowError, Template, column_text
from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.chat.renderer import TrainedChat
from spotune_trainer.data.documents import Document, Segment, TokenizedDocument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LABELS: Final = {"true": True, "1": True, "false": False, "0": False}


def check_chat_column(answer: Template) -> None:
    """Check that a template is one column, such as ``{chosen}``, whose chat ends with the answer.

    Raises:
        ValueError: The template is more than one column.
    """
    if answer.source != f"{{{''.join(answer.columns)}}}":
        raise ValueError(
            f'without prompt, chosen and rejected are columns with chats, such as "{{chosen}}", not "{answer.source}": '
            "set prompt for answers that are plain text"
        )


def pair_documents(chosen: Document, rejected: Document) -> Document:
    """The document of a pair. If the chat template cannot say one of its answers, it has the problem and no loss.

    Raises:
        RowError: An answer is empty or cannot be rendered, the prompts differ, or the answers are the same.
    """
    for name, document in (("chosen", chosen), ("rejected", rejected)):
        if document.chat is not None and document.chat.problems:
            return _skipped_pair(chosen, rejected, name, document.chat)
    for name, document in (("chosen", chosen), ("rejected", rejected)):
        if not document.completion.strip():
            raise RowError(f"{name} is an empty answer: remove the row, or correct it")
        if not any(segment.has_loss for segment in document.segments):
            raise RowError(f"{name}: the last message is not the assistant's, or is flagged not to be trained on")
    if _prompt(chosen) != _prompt(rejected):
        raise RowError("chosen and rejected answer different prompts: their chats may differ in the last message only")
    if chosen.segments == rejected.segments:
        raise RowError("chosen and rejected are the same answer, so nothing can be learned: remove the row")
    return dataclasses.replace(chosen, rejected=rejected)


def read_desirable(row: Mapping[str, Any], column: str) -> bool:
    """Whether the answer of a row is desirable, by the column with its label.

    Raises:
        RowError: The row lacks the column, or its value is neither true nor false.
    """
    text = column_text(row, column)
    desirable = _LABELS.get(text.strip().lower())
    if desirable is None:
        raise RowError(
            f"the label {{{column}}} is {text!r}: it says whether the answer is desirable, by true or false, 1 or 0"
        )
    return desirable


def labelled_document(document: Document, *, desirable: bool) -> Document:
    """The document of an answer with its label.

    Raises:
        RowError: The answer is empty or cannot be rendered.
    """
    if document.chat is not None and document.chat.problems:
        raise RowError(document.chat.problems[0])
    if not document.completion.strip():
        raise RowError("the answer is empty: remove the row, or correct it")
    if not any(segment.has_loss for segment in document.segments):
        raise RowError("the last message is not the assistant's, or is flagged not to be trained on")
    return dataclasses.replace(document, desirable=desirable)


def with_mismatched(documents: Sequence[Document], earlier: Sequence[Document] = ()) -> list[Document]:
    """Labelled answers, each with its mismatched document: the answer is that of the next row with another prompt.

    After the last document the first one follows, then `earlier`. If all have the same prompt, it is that of the next
    row, and a document without others has its own answer.

    Args:
        documents: in the order of the file.
        earlier: documents of the same file before them.
    """
    rows = [*documents, *earlier]
    prompts = [_prompt(row) for row in rows]
    found = []
    for number, document in enumerate(documents):
        others = (*range(number + 1, len(documents)), *range(number), *range(len(documents), len(rows)))
        other = next((each for each in others if prompts[each] != prompts[number]), (*others, number)[0])
        segments = (*prompts[number], *rows[other].segments[len(prompts[other]) :])
        mismatched = dataclasses.replace(document, segments=segments)
        found.append(dataclasses.replace(document, mismatched=mismatched))
    return found


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
    if not texts:
        return
    lengths = iter([len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]])
    encoded = iter(tokenizer(texts, truncation=True, max_length=max_length)["input_ids"])
    for document in documents:
        count = len(document.segments)
        parts, full = list(islice(encoded, count)), list(islice(lengths, count))
        ids = np.concatenate([np.array(part, dtype=np.int32) for part in parts])
        yield TokenizedDocument(
            ids,
            ids,
            full_length=sum(full),
            truncated=sum(full) > len(ids),
            pair_lengths=np.array([len(part) for part in parts], dtype=np.int32),
            longest=max(full),
        )


def join_pairs(documents: Iterable[TokenizedDocument]) -> Iterator[TokenizedDocument]:
    """One row for each two documents, the chosen and the rejected one: their tokens one after the other."""
    alternating = iter(documents)
    for chosen, rejected in zip(alternating, alternating, strict=True):
        yield dataclasses.replace(
            _join(chosen, rejected),
            truncated=chosen.truncated or rejected.truncated,
            cut_turns=max(chosen.cut_turns, rejected.cut_turns),
            longest=max(chosen.full_length, rejected.full_length),
        )


def join_mismatched(documents: Iterable[TokenizedDocument]) -> Iterator[TokenizedDocument]:
    """One row for each two documents, a labelled answer's and its mismatched one: their tokens one after the other."""
    alternating = iter(documents)
    for own, mismatched in zip(alternating, alternating, strict=True):
        joined = _join(own, mismatched)
        yield dataclasses.replace(joined, truncated=own.truncated, cut_turns=own.cut_turns, longest=own.full_length)


def _join(first: TokenizedDocument, second: TokenizedDocument) -> TokenizedDocument:
    labels = np.concatenate([first.labels, second.labels])
    labels[:1] = NO_LOSS  # nothing precedes the first token of a document
    labels[len(first.labels) :][:1] = NO_LOSS
    return TokenizedDocument(
        np.concatenate([first.input_ids, second.input_ids]),
        labels,
        full_length=first.full_length + second.full_length,
        truncated=False,
        pair_lengths=np.array([len(first.input_ids), len(second.input_ids)], dtype=np.int32),
    )


def split_pair(tokens: TokenizedDocument) -> list[TokenizedDocument]:
    """The documents of a row, such as the chosen and the rejected one; the document itself if it has one."""
    if tokens.pair_lengths is None:
        return [tokens]
    places = np.cumsum(tokens.pair_lengths)[:-1]
    return [
        dataclasses.replace(tokens, input_ids=ids, labels=labels, full_length=len(ids), pair_lengths=None, longest=0)
        for ids, labels in zip(np.split(tokens.input_ids, places), np.split(tokens.labels, places), strict=True)
    ]


def teaches(tokens: TokenizedDocument) -> bool:
    """Whether both answers of a pair have tokens that carry loss, and differ within the maximum length."""
    chosen, rejected = split_pair(tokens)
    return (
        bool(np.any(chosen.labels != NO_LOSS))
        and bool(np.any(rejected.labels != NO_LOSS))
        and not np.array_equal(chosen.input_ids, rejected.input_ids)
    )


def _skipped_pair(chosen: Document, rejected: Document, name: str, chat: TrainedChat) -> Document:
    """A pair that cannot be trained on, because the chat template does not render the answer `name` as it is."""
    without_loss = [
        dataclasses.replace(
            document, segments=tuple(dataclasses.replace(segment, has_loss=False) for segment in document.segments)
        )
        for document in (chosen, rejected)
    ]
    problems = tuple(f"{name}: {problem}" for problem in chat.problems)
    return dataclasses.replace(
        without_loss[0], rejected=without_loss[1], chat=dataclasses.replace(chat, problems=problems)
    )


def _prompt(document: Document) -> list[Segment]:
    """The segments before the answer."""
    first = next(index for index, segment in enumerate(document.segments) if segment.has_loss)
    return list(document.segments[:first])
