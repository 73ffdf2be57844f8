"""Answers with a label: whether they are desirable.

They share their row with a mismatched document: the same prompt with the answer of another row. KTO estimates from
these how far the model is from its reference (Ethayarajh et al. 2024, section 4.1). They are fixed when shards are
written, so the reference model's log-probabilities of them can be computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from spotune.prompting.template import RowError, column_text
from spotune_trainer.data.rows.documents import Document, TokenizedDocument
from spotune_trainer.data.rows.pairs import join_documents, prompt_segments

_LABELS: Final = {"true": True, "1": True, "false": False, "0": False}


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
        raise RowError(f"{document.chat.problems[0]}: correct the row, or use another chat template")
    if not document.completion.strip():
        raise RowError("the answer is empty: remove the row, or correct it")
    if not any(segment.has_loss for segment in document.segments):
        raise RowError(
            "the last message is not the assistant's, or is flagged not to be trained on: correct or remove the row"
        )
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
    prompts = [prompt_segments(row) for row in rows]

    def others(number: int) -> Iterator[int]:
        return chain(range(number + 1, len(documents)), range(number), range(len(documents), len(rows)))

    found = []
    for number, document in enumerate(documents):
        with_another_prompt = (each for each in others(number) if prompts[each] != prompts[number])
        other = next(with_another_prompt, next(others(number), number))
        segments = (*prompts[number], *rows[other].segments[len(prompts[other]) :])
        mismatched = dataclasses.replace(document, segments=segments)
        found.append(dataclasses.replace(document, mismatched=mismatched))
    return found


def join_mismatched(documents: Iterable[TokenizedDocument]) -> Iterator[TokenizedDocument]:
    """One row for each two documents, a labelled answer's and its mismatched one: their tokens one after the other."""
    alternating = iter(documents)
    for own, mismatched in zip(alternating, alternating, strict=True):
        joined = join_documents(own, mismatched)
        yield dataclasses.replace(
            joined,
            truncated=own.truncated,
            cut_turns=own.cut_turns,
            longest=own.full_length,
            cut_loss_tokens=own.cut_loss_tokens,
        )
