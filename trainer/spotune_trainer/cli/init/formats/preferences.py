"""Preference pairs: a preferred and a rejected answer to the same prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from spotune.errors import JobError
from spotune_trainer.cli.init.formats.answers import NO_PROMPT, PROMPTS, prompt_columns, prompt_template, unusable_chat
from spotune_trainer.cli.init.formats.fitting import check_templates, columns_of
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat

PREFERENCES: Final = (
    *(("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_chosen", "response_rejected")),
    *(("preferred", "rejected"), ("preferred", "dispreferred"), ("accepted", "rejected")),
    *(("preferred_response", "dispreferred_response"), ("preferred_response", "rejected_response")),
    *(("better", "worse"), ("better_response", "worse_response"), ("better_answer", "worse_answer")),
    ("response_j", "response_k"),  # of Stack Exchange Paired, where j is the better one
)
"""Names of columns that usually hold a preferred answer and one that is not. Names that do not say which one is better,
such as response_0 and response_1, are not among them: another column says it there, row by row."""


def preference_format(columns: Sequence[ColumnProfile], prompt: str, chosen: str, rejected: str) -> RowFormat:
    """The format for a preferred and a rejected answer.

    Args:
        columns: All columns.
        prompt: Template of the prompt; empty if the answers are columns with chats.
        chosen: Template of the preferred answer, or the column with its chat in braces.
        rejected: The same of the answer that is not preferred.

    Raises:
        JobError: A template names a column that does not fit, or answers without their prompt. Or it is malformed.
    """
    check_templates(columns, *filter(None, (prompt, chosen, rejected)))
    names = [name for template in (chosen, rejected) for name in columns_of(template)]
    chats = [column for column in columns if column.name in names and not column.fits_templates]
    if any(column.kind == "answer" for column in chats):
        raise JobError(
            f"columns {' and '.join(map(repr, names))} have answers without their prompt, and spotune reads whole "
            f"chats there. Add the prompt first: {_whole_chats(columns, names)}"
        )
    if prompt and chats:
        raise JobError(
            f"column {chats[0].name!r} has chats, which contain the prompt: leave --prompt out, or name columns of "
            "text with --chosen and --rejected"
        )
    if not prompt and len(chats) < len(names):
        raise JobError(
            f"without --prompt, --chosen and --rejected have to name columns of chats, and {', '.join(names)} are not: "
            "give the prompt with --prompt '{...}'"
        )
    if chats:
        reason = (
            f"{chosen!r} and {rejected!r} have chats that are equal up to the last message, the answer. The "
            "tokenizer's chat template renders them."
        )
        return RowFormat(chosen=chosen, rejected=rejected, reason=reason)
    reason = (
        f"The model reads {prompt!r}, and learns to prefer {chosen!r} over {rejected!r}. Names in braces are columns. "
        "Write the text around them as in the prompts that the model was finetuned with."
    )
    return RowFormat(prompt=prompt, chosen=chosen, rejected=rejected, reason=reason)


def find_answers(columns: Sequence[ColumnProfile]) -> tuple[ColumnProfile, ColumnProfile] | None:
    """The columns with preferred and rejected answers, by their names; None if there are none.

    Numbers are no answers: they are scores, or say which of other columns is the better one.
    """
    by_name = {column.name.lower(): column for column in columns}
    for chosen, rejected in PREFERENCES:
        if chosen in by_name and rejected in by_name:
            found = by_name[chosen], by_name[rejected]
            if not any(column.kind in ("number", "boolean", None) for column in found):
                return found
    return None


def pairs_format(
    columns: Sequence[ColumnProfile], chosen: ColumnProfile, rejected: ColumnProfile, *, has_chat_template: bool
) -> RowFormat:
    """The format for preference pairs in two columns.

    Raises:
        JobError: The answers have no prompt, or are of a kind that is not read.
    """
    names = f"columns {chosen.name!r} and {rejected.name!r}"
    templates = f"{{{chosen.name}}}", f"{{{rejected.name}}}"
    if chosen.kind == rejected.kind and chosen.kind in ("chat", "answer"):
        if not has_chat_template:
            raise JobError(unusable_chat(chosen.name, "causal"))
        reason = f"By the names of the columns: the model learns to prefer {chosen.name} over {rejected.name}. "
        found = preference_format(columns, "", *templates)
        return replace(found, reason=reason + found.reason)
    if not (chosen.fits_templates and rejected.fits_templates):
        kinds = f"{chosen.kind} and {rejected.kind}"
        raise JobError(
            f"{names} hold values of the kinds {kinds}: for preference pairs write text, or lists of messages with "
            "role and content, into both; for something else name its columns with the options for them"
        )
    before, left_out = prompt_columns(columns, ignored=NO_PROMPT)
    if not before:
        raise JobError(
            f"{names} have answers, but no column is known as their prompt: name it with --prompt '{{...}}', together "
            f"with --chosen '{templates[0]}' and --rejected '{templates[1]}'. Whole conversations "
            "have to be lists of messages with role and content, in both columns"
        )
    prompt = prompt_template([column.name for column in before], "causal")
    read = ", ".join(column.name for column in before)
    found = preference_format(columns, prompt, *templates)
    reason = (
        f"By the names of the columns: the model reads {read}, and learns to prefer {chosen.name} over {rejected.name}."
        f"{left_out} Write the text around the names in braces as in the prompts that the model was finetuned with."
    )
    if has_chat_template:
        reason += " The model has a chat template: for its form, chosen and rejected have to be columns of chats."
    return replace(found, reason=reason)


def _whole_chats(columns: Sequence[ColumnProfile], answers: Sequence[str]) -> str:
    """The command that puts the prompt before the answers."""
    by_name = {column.name.lower(): column for column in columns if column.fits_templates or column.kind == "chat"}
    chats = [column.name.lower() for column in columns if column.kind == "chat"]
    prompt = next((by_name[name] for name in ("prompt", *chats, *PROMPTS) if name in by_name), None)
    column = f".[{json.dumps(prompt.name if prompt is not None else 'prompt')}]"
    is_chat = prompt is not None and prompt.kind == "chat"
    messages = column if is_chat else f'[{{role: "user", content: {column}}}]'
    changes = " | ".join(f".[{json.dumps(answer)}] |= $prompt + ." for answer in answers)
    return f"jq -c '{messages} as $prompt | {changes}' rows.jsonl > pairs.jsonl"
