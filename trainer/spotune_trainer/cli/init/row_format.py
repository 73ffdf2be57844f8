"""Chooses the row format from the columns: preference pairs, a chat, a prompt with a completion, or plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Literal

from spotune.errors import JobError
from spotune.prompting.template import Template
from spotune_trainer.cli.init.profiles import ColumnProfile, RowFormat

Task = Literal["causal", "seq2seq"]

COMPLETIONS: Final = (
    *("completion", "response", "answer", "output", "target", "chosen", "sql", "code", "summary", "highlights"),
    *("translation", "label_text", "label", "sentiment", "category"),
)
"""Names of columns that are usually to be learned, most specific first."""
PROMPTS: Final = (
    *("system", "instruction", "prompt", "question", "query", "input", "context", "premise", "hypothesis"),
    *("sentence", "sentence1", "sentence2", "schema", "columns", "title", "document", "article", "dialogue"),
    *("passage", "source", "text"),
)
"""Names of columns that usually precede them, in the order of the prompt."""
TEXTS: Final = ("text", "content", "body", "article", "document")
"""Names of columns that usually are plain text."""
PREFERENCES: Final = (
    *(("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_chosen", "response_rejected")),
    *(("preferred", "rejected"), ("preferred", "dispreferred"), ("accepted", "rejected")),
    *(("preferred_response", "dispreferred_response"), ("preferred_response", "rejected_response")),
    *(("better", "worse"), ("better_response", "worse_response"), ("better_answer", "worse_answer")),
    ("response_j", "response_k"),  # of Stack Exchange Paired, where j is the better one
)
"""Names of columns that usually hold a preferred answer and one that is not. Names that do not say which one is better,
such as response_0 and response_1, are not among them: another column says it there, row by row."""
_LABELS: Final = ("label", "desirable", "good", "liked", "thumbs_up", "accepted", "correct")
"""Names of columns that, with true and false, usually say whether an answer is desirable."""
_NO_PROMPT: Final = "source"
"""Beside preference pairs, this column usually names where a row is from."""

_OPTIONS = (
    "name the columns with --prompt '{...}' --completion '{...}', with --text COLUMN, with --messages COLUMN, or with "
    "--chosen '{...}' --rejected '{...}'"
)
_TO_CHAT = (
    'jq -c \'.{0} |= map({{role: ({{human: "user", gpt: "assistant"}}[.from] // .from), content: .value}})\' '
    "rows.jsonl > chats.jsonl"
)


def choose_row_format(columns: Sequence[ColumnProfile], task: Task, *, has_chat_template: bool) -> RowFormat:
    """The row format that the columns suggest.

    Args:
        columns: All columns.
        task: Of the model. Preference pairs, chats and plain text are for causal models.
        has_chat_template: Whether the model's tokenizer can render chats.

    Raises:
        JobError: No format fits, or a column that it needs has no value in some rows. The message names the fix.
    """
    answers = _preferences(columns)
    if answers is not None and task == "causal":
        return _pairs(columns, *answers, has_chat_template=has_chat_template)
    chat = next((column for column in columns if column.kind == "chat"), None)
    if chat is not None and task == "causal" and has_chat_template:
        _refuse_label(columns, "", f"--messages {chat.name}")
        return chat_format(columns, chat.name)
    completed = _prompt_and_completion(columns, task, answers)
    if completed is not None:
        _refuse_label(columns, completed.completion, "--prompt and --completion")
        return completed
    if chat is not None:
        raise JobError(_unusable_chat(chat.name, task))
    sharegpt = next((column for column in columns if column.kind == "sharegpt"), None)
    if sharegpt is not None:
        raise JobError(
            f"column {sharegpt.name!r} has chats in ShareGPT's form (from, value), which spotune does not read: it "
            f"reads role and content. Convert the rows first: {_TO_CHAT.format(sharegpt.name)}"
        )
    text = _plain_text(columns)
    if text is None:
        raise JobError(f"the row format cannot be told from the columns: {describe(columns)}. Please {_OPTIONS}.")
    if task == "seq2seq":
        raise JobError(
            f"the rows have plain text ({text.name!r}), but a seq2seq model learns a completion for each prompt: "
            f"{_OPTIONS.split(', with')[0]}"
        )
    return text_format(columns, text.name)


def _refuse_label(columns: Sequence[ColumnProfile], completion: str, options: str) -> None:
    """Raise JobError if a column seems to say of each answer whether it is desirable: sft would learn all of them.

    Args:
        columns: All columns.
        completion: Template of the answer; empty for chats.
        options: Options of the command line that name the answers.
    """
    label = next((column for column in columns if column.kind == "boolean" and column.name.lower() in _LABELS), None)
    if label is None or completion == f"{{{label.name}}}":
        return
    raise JobError(
        f"column {label.name!r} is true or false beside an answer. If it says whether the answer is desirable, write a "
        f"job with training.objective: kto and dataset.label: '{{{label.name}}}'. If all "
        f"answers are to be learned, name them with {options}"
    )


def chat_format(columns: Sequence[ColumnProfile], messages: str) -> RowFormat:
    """The format for the chats in the column `messages`; a column `tools` holds the tools that they may call."""
    tools = "tools" if any(column.name == "tools" for column in columns) and messages != "tools" else ""
    with_tools = "; column 'tools' has the functions that it may call" if tools else ""
    return RowFormat(
        messages=_checked(columns, messages),
        tools=tools,
        reason=f"Column {messages!r} has messages with role and content{with_tools}. The tokenizer's chat template "
        "renders them, and the model learns every assistant message (trainOn: last learns the last one only).",
    )


def completion_format(columns: Sequence[ColumnProfile], prompt: str, completion: str) -> RowFormat:
    """The format for two templates.

    Raises:
        JobError: A template names a column that does not fit. Or it is malformed.
    """
    _check_templates(columns, prompt, completion)
    return RowFormat(
        prompt=prompt,
        completion=completion,
        reason=f"The model reads {prompt!r} and learns {completion!r}. Names in braces are columns; the rest is yours "
        "to change.",
    )


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
    _check_templates(columns, *filter(None, (prompt, chosen, rejected)))
    names = [name for template in (chosen, rejected) for name in _columns_of(template)]
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


def text_format(columns: Sequence[ColumnProfile], text: str) -> RowFormat:
    """The format for a column, or a template over columns, of plain text.

    Raises:
        JobError: A column does not fit.
    """
    for name in _columns_of(text) or [text]:
        _checked(columns, name)
    return RowFormat(text=text, reason=f"{text!r} is plain text: the model learns all of it.")


def describe(columns: Iterable[ColumnProfile]) -> str:
    """The columns with their kinds, for messages."""
    return ", ".join(f"{column.name!r} ({column.kind or 'null'})" for column in columns) or "there are none"


def _preferences(columns: Sequence[ColumnProfile]) -> tuple[ColumnProfile, ColumnProfile] | None:
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


def _pairs(
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
            raise JobError(_unusable_chat(chosen.name, "causal"))
        reason = f"By the names of the columns: the model learns to prefer {chosen.name} over {rejected.name}. "
        found = preference_format(columns, "", *templates)
        return replace(found, reason=reason + found.reason)
    if not (chosen.fits_templates and rejected.fits_templates):
        kinds = f"{chosen.kind} and {rejected.kind}"
        raise JobError(
            f"{names} hold values of the kinds {kinds}: for preference pairs write text, or lists of messages with "
            "role and content, into both; for something else name its columns with the options for them"
        )
    before, left_out = _before(columns, ignored=_NO_PROMPT)
    if not before:
        raise JobError(
            f"{names} have answers, but no column is known as their prompt: name it with --prompt '{{...}}', together "
            f"with --chosen '{templates[0]}' and --rejected '{templates[1]}'. Whole conversations "
            "have to be lists of messages with role and content, in both columns"
        )
    prompt = _prompt([column.name for column in before], "causal")
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


def _prompt_and_completion(
    columns: Sequence[ColumnProfile], task: Task, answers: tuple[ColumnProfile, ColumnProfile] | None
) -> RowFormat | None:
    """Prompt and completion, from the names of the columns; None if there are no such columns.

    Args:
        columns: All columns.
        task: Of the model.
        answers: Columns with preferred and rejected answers, of which this model learns the preferred ones.
    """
    by_name = {column.name.lower(): column for column in columns if column.fits_templates}
    completion = next((by_name[name] for name in COMPLETIONS if name in by_name), None)
    preferred = answers is not None and answers[0].fits_templates
    if answers is not None and preferred:
        completion = answers[0]
    before, left_out = _before(columns, ignored=_NO_PROMPT if preferred else "")
    if completion is None or not before:
        return None
    for column in (completion, before[0]):
        _checked(columns, column.name)
    found = completion_format(columns, _prompt([column.name for column in before], task), f"{{{completion.name}}}")
    names = ", ".join(column.name for column in before)
    reason = f"By the names of the columns: the model reads {names} and learns {completion.name}.{left_out}"
    if answers is not None and preferred:
        reason += (
            f" {answers[1].name!r} is not used: to learn from preferences (objective dpo, orpo or simpo) needs a "
            "causal model, and this is a seq2seq model, which learns the preferred answers."
        )
    if completion.empty:
        reason += f" {completion.empty:,} rows have an empty {completion.name!r}: the model learns to answer nothing."
    if completion.kind != "text":
        reason += f" {completion.name!r} holds {completion.kind}s: the model learns to write them as they are."
    return RowFormat(prompt=found.prompt, completion=found.completion, reason=reason)


def _before(columns: Sequence[ColumnProfile], *, ignored: str) -> tuple[list[ColumnProfile], str]:
    """The columns of the prompt, by their names, and a remark on those of them that have gaps and are left out.

    If all have gaps, all are returned. `ignored` is a name that does not count.
    """
    by_name = {column.name.lower(): column for column in columns if column.fits_templates}
    found = [by_name[name] for name in PROMPTS if name in by_name and name != ignored]
    complete = [column for column in found if not column.missing_at] or found
    remarks = [
        f" {column.name!r} is left out: it has no value in some rows (the first is {column.missing_at})."
        for column in found
        if column not in complete
    ]
    return complete, "".join(remarks)


def _prompt(names: Sequence[str], task: Task) -> str:
    """A template over columns. A seq2seq model has an encoder of its own, so its prompt needs no headings."""
    if task == "seq2seq":
        return " | ".join(f"{{{name}}}" for name in names)
    if [name.lower() for name in names] == ["prompt"]:
        return f"{{{names[0]}}}"
    sections = [f"### {name.replace('_', ' ').capitalize()}:\n{{{name}}}\n\n" for name in names]
    return "".join(sections) + "### Response:\n"


def _plain_text(columns: Sequence[ColumnProfile]) -> ColumnProfile | None:
    """The column of plain text: by its name, or the only one with text."""
    texts = [column for column in columns if column.kind == "text" and column.fits_templates]
    named = [column for name in TEXTS for column in texts if column.name.lower() == name]
    return named[0] if named else texts[0] if len(texts) == 1 else None


def _check_templates(columns: Sequence[ColumnProfile], *templates: str) -> None:
    """Raise JobError if a template names no column, or one that does not fit."""
    for template in templates:
        names = _columns_of(template)
        if not names:
            raise JobError(f"the template {template!r} names no column: write names in braces, such as '{{question}}'")
        for name in names:
            _checked(columns, name)


def _columns_of(template: str) -> list[str]:
    """The columns that a template names. Raises JobError if a brace has no counterpart."""
    try:
        return Template(template).columns
    except ValueError as error:
        raise JobError(str(error)) from error


def _checked(columns: Sequence[ColumnProfile], name: str) -> str:
    """The name of a column that has a value of a suitable kind in every row.

    Raises:
        JobError: It does not exist, or has other values.
    """
    column = next((column for column in columns if column.name == name), None)
    if column is None:
        raise JobError(f"there is no column {name!r}; the rows have {describe(columns)}")
    if column.missing_at:
        raise JobError(
            f"column {name!r} has no value in some rows; the first is {column.missing_at}. Give these rows a value, "
            f"remove them, or {_OPTIONS}."
        )
    if column.kind not in ("chat", "answer") and not column.fits_templates:
        other = next((kind for kind in column.kinds if kind not in ("text", "number", "boolean")), column.kind)
        raise JobError(
            f"column {name!r} holds values of the kind {other}, which a template cannot contain: write what is to be "
            "learned into a column of text"
        )
    return name


def _unusable_chat(name: str, task: Task) -> str:
    if task == "seq2seq":
        return (
            f"column {name!r} has chats, which seq2seq models cannot learn: write prompt and answer into columns of "
            "their own, or name a causal model with --model"
        )
    return (
        f"column {name!r} has chats, but the tokenizer has no chat template, so it is probably that of a base model: "
        "name the model's chat version with --model, or a tokenizer with a template and the same vocabulary with "
        "--tokenizer"
    )
