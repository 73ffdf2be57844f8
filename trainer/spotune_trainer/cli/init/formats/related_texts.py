"""Texts that belong together, from which a model learns embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from spotune_trainer.cli.init.formats.fitting import check_templates
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat

QUERIES: Final = ("anchor", "query", "question", "sentence")
"""Names of columns whose text is brought near to another one, if that is there."""
POSITIVES: Final = ("positive", "pos", "positive_passage", "positive_text")
NEGATIVES: Final = ("negative", "neg", "negative_passage", "negative_text", "hard_negative")


def find_related_texts(columns: Sequence[ColumnProfile]) -> RowFormat | None:
    """The format for a text and one near to it, by the names of the columns; None if there are none."""
    by_name = {column.name.lower(): column for column in columns if column.kind == "text" and column.fits_templates}
    query, positive, negative = (
        next((by_name[name] for name in names if name in by_name), None) for names in (QUERIES, POSITIVES, NEGATIVES)
    )
    if query is None or positive is None:
        return None
    left_out = ""
    if negative is not None and (negative.missing_at or negative.empty):
        left_out = f" {negative.name!r} is left out: it has no text in some rows."
        negative = None
    hard = f", and far from {negative.name}" if negative is not None else ""
    found = related_texts_format(
        columns, f"{{{query.name}}}", f"{{{positive.name}}}", f"{{{negative.name}}}" if negative is not None else ""
    )
    reason = f"By the names of the columns: the model learns embeddings of {query.name} near to {positive.name}{hard}."
    return replace(found, reason=f"{reason}{left_out} {found.reason}")


def related_texts_format(columns: Sequence[ColumnProfile], query: str, positive: str, negative: str) -> RowFormat:
    """The format for templates of a text, of one near to it and, if it is not empty, of one that is not.

    Raises:
        JobError: A template names a column that does not fit. Or it is malformed.
    """
    check_templates(columns, *filter(None, (query, positive, negative)))
    reason = "Texts of other rows are not near. Text before a column, such as 'query: ', is a prompt of the model."
    return RowFormat(query=query, positive=positive, negative=negative, reason=reason)
