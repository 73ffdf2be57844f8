"""Documents that share a row: a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from spotune.prompting.template import RowError, Template
from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.chat.renderer import TrainedChat
from spotune_trainer.data.rows.documents import Document, Segment, TokenizedDocument


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
            return _skipped_pair(chosen, rejected, name, document, document.chat)
    for name, document in (("chosen", chosen), ("rejected", rejected)):
        if not document.completion.strip():
            raise RowError(f"{name} is an empty answer: remove the row, or correct it")
        if not any(segment.has_loss for segment in document.segments):
            raise RowError(
                f"{name}: the last message is not the assistant's, or is flagged not to be trained on: correct or "
                "remove the row"
            )
    if prompt_segments(chosen) != prompt_segments(rejected):
        raise RowError(
            "chosen and rejected answer different prompts: their chats may differ in the last message only. Correct or "
            "remove the row"
        )
    if chosen.segments == rejected.segments:
        raise RowError("chosen and rejected are the same answer, so nothing can be learned: remove the row")
    if _answer(chosen) == _answer(rejected):
        raise RowError("chosen and rejected differ only in the whitespace around the answer: remove the row")
    return dataclasses.replace(chosen, rejected=rejected)


def join_pairs(documents: Iterable[TokenizedDocument]) -> Iterator[TokenizedDocument]:
    """One row for each two documents, the chosen and the rejected one: their tokens one after the other."""
    alternating = iter(documents)
    for chosen, rejected in zip(alternating, alternating, strict=True):
        yield dataclasses.replace(
            join_documents(chosen, rejected),
            truncated=chosen.truncated or rejected.truncated,
            cut_turns=max(chosen.cut_turns, rejected.cut_turns),
            longest=max(chosen.full_length, rejected.full_length),
            cut_loss_tokens=chosen.cut_loss_tokens + rejected.cut_loss_tokens,
        )


def join_documents(first: TokenizedDocument, second: TokenizedDocument) -> TokenizedDocument:
    """One row of two documents: their tokens one after the other."""
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


def _skipped_pair(chosen: Document, rejected: Document, name: str, document: Document, chat: TrainedChat) -> Document:
    """A pair that cannot be trained on, because the chat template does not render the answer `name` as it is."""
    without_loss = [
        dataclasses.replace(
            document, segments=tuple(dataclasses.replace(segment, has_loss=False) for segment in document.segments)
        )
        for document in (chosen, rejected)
    ]
    problems = tuple(f"{name}: {problem}" for problem in chat.problems)
    return dataclasses.replace(
        without_loss[0],
        rejected=without_loss[1],
        chat=dataclasses.replace(chat, problems=problems),
        turns_left_out=document.turns_left_out,
    )


def _answer(document: Document) -> tuple[str, str]:
    """What an answer says: its content without the whitespace around it, and all that is learned without any."""
    learned = "".join(segment.text for segment in document.segments if segment.has_loss)
    return document.completion.strip(), "".join(learned.split())


def prompt_segments(document: Document) -> list[Segment]:
    """The segments before the answer."""
    first = next(index for index, segment in enumerate(document.segments) if segment.has_loss)
    return list(document.segments[:first])
