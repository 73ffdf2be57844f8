"""The row format that options of the command line name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from spotune.errors import UsageError
from spotune_trainer.cli.init.formats.answers import chat_format, completion_format, text_format
from spotune_trainer.cli.init.formats.labels import labelled_answer_format, labelled_text_format
from spotune_trainer.cli.init.formats.preferences import preference_format
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat
from spotune_trainer.cli.init.formats.related_texts import related_texts_format

_TOGETHER: Final = (("chosen", "rejected"), ("query", "positive"))


def given_format(columns: Sequence[ColumnProfile], options: Mapping[str, str]) -> RowFormat | None:
    """The row format of the options; None if they give none.

    Args:
        columns: All columns.
        options: Values by name of the option; empty for options that are not given.

    Raises:
        UsageError: Options are missing or contradict each other.
        JobError: A column does not fit.
    """
    given = {name: value for name, value in options.items() if value}
    if not given:
        return None
    _check_together(given)
    if "query" in given:
        return related_texts_format(columns, given["query"], given["positive"], given.get("negative", ""))
    if "chosen" in given:
        return preference_format(columns, given.get("prompt", ""), given["chosen"], given["rejected"])
    if "text" in given:
        label = given.get("label")
        return labelled_text_format(columns, given["text"], label) if label else text_format(columns, given["text"])
    if "messages" in given:
        answers = chat_format(columns, given["messages"])
    else:
        answers = completion_format(columns, given["prompt"], given["completion"])
    return labelled_answer_format(columns, answers, given["label"]) if "label" in given else answers


def _check_together(given: Mapping[str, str]) -> None:
    formats = [name for name in ("completion", "text", "messages", "chosen", "query") if name in given]
    formats += ["chosen"] * ("rejected" in given and "chosen" not in given)
    if len(formats) > 1 or ("prompt" in given and {"text", "messages", "query"} & given.keys()):
        raise UsageError(
            "give only one of --prompt with --completion, --text, --messages, --chosen with --rejected, and --query "
            "with --positive"
        )
    for one, other in _TOGETHER:
        if (one in given) != (other in given):
            raise UsageError(f"--{one} and --{other} have to be given together")
    if "negative" in given and "query" not in given:
        raise UsageError("--negative needs --query and --positive")
    if "chosen" not in given and ("prompt" in given) != ("completion" in given):
        raise UsageError("--prompt and --completion have to be given together; for plain text use --text")
    if "label" in given and (not formats or {"chosen", "query"} & given.keys()):
        raise UsageError(
            "--label needs the text that it is of: --text, or an answer (--prompt with --completion, or --messages)"
        )
