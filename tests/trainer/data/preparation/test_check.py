"""`spotune validate` refuses the rows that `spotune shard` refuses, with the same message, and no others."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune_trainer.data.preparation.check import MAX_PROBLEMS, CheckedRows, check_rows
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.rows.options import TextOptions

Row = dict[str, Any]

ANSWERS = TextOptions("causal", "{q}", "{a}", max_length=64)
PAIRS = TextOptions("causal", "{q}", chosen="{good}", rejected="{bad}")
SHORT_PAIRS = TextOptions("causal", "{q}", chosen="{good}", rejected="{bad}", max_length=4)
CHATS = TextOptions("causal", messages="chat")
TOOLS = TextOptions("causal", messages="chat", tools="tools")
TEXT = TextOptions("causal", text="t")
LABELS = TextOptions("causal", text="{t}", label="{l}", labels=("no", "yes"))
WORDS = TextOptions("causal", text="{t}", label="{l}", labels=("O", "B-X"), label_each_word=True)
LABELLED_ANSWERS = TextOptions("causal", "{q}", "{a}", label="{l}")
RELATED = TextOptions("causal", query="{q}", positive="{a}")
GOOD = {"q": "How many?", "a": "Seven.", "good": "Seven.", "bad": "Why?", "t": "text", "l": "yes"}
EQUAL_WHEN_CUT = {"q": "?", "good": "Seventy", "bad": "Seventh"}
USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
EMPTY = {"role": "assistant", "content": ""}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


def lines(*rows: Row) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def compressed(content: bytes) -> bytes:
    return gzip.compress(content)[:-9]  # cut short


BAD: list[tuple[str, TextOptions, str, bytes, str]] = [
    ("empty completion", ANSWERS, "rows.jsonl", lines(GOOD, GOOD | {"a": " "}), r"rows\.jsonl:2: the completion is e"),
    ("missing field", ANSWERS, "rows.jsonl", lines({"q": "?"}), r"rows\.jsonl:1: no column 'a'"),
    ("null", ANSWERS, "rows.jsonl", lines(GOOD, GOOD | {"q": None}), r"rows\.jsonl:2: .*'q'"),
    ("equal pair", PAIRS, "rows.jsonl", lines(GOOD | {"bad": "Seven."}), r"rows\.jsonl:1: chosen and rejected are the"),
    ("lost turn", CHATS, "rows.jsonl", lines({"chat": [USER, CALL]}), r"rows\.jsonl:1: .*message 2"),
    ("unknown label", LABELS, "rows.jsonl", lines(GOOD | {"l": "perhaps"}), r"the label 'perhaps' is not in"),
    ("words and labels", WORDS, "rows.jsonl", lines({"t": ["a", "b"], "l": ["O"]}), "has 2 words, but 'l' has 1"),
    ("undecided", LABELLED_ANSWERS, "rows.jsonl", lines(GOOD | {"l": "maybe"}), "by true or false, 1 or 0"),
    ("empty text", RELATED, "rows.jsonl", lines(GOOD | {"a": ""}), "positive is an empty text"),
    ("mixed encodings", ANSWERS, "rows.jsonl", lines(GOOD) + '{"q": "é", "a": "ü"}'.encode("latin-1"), "not UTF-8"),
    ("cut JSON", ANSWERS, "rows.jsonl", lines(GOOD, GOOD)[:-9], r"rows\.jsonl:2: invalid JSON.*copy it again"),
    ("cut gzip", ANSWERS, "rows.jsonl.gz", compressed(lines(GOOD)), "not a complete gzip file"),
    ("cut CSV row", ANSWERS, "rows.csv", b"q,a\nHow,7\nWhy\n", r"rows\.csv:3: 1 field, but the header names 2"),
    ("CSV column", ANSWERS, "rows.csv", b"q,b\nHow,7\n", r"rows\.csv:1: no column 'a'"),
    ("no Parquet", ANSWERS, "rows.parquet", b"PAR1", "not a Parquet file"),
    ("blank file", ANSWERS, "rows.jsonl", b"\n", "the input has no rows"),
    ("long prompts", ANSWERS, "rows.jsonl", lines(GOOD | {"q": "why " * 99}), r"rows\.jsonl:1: nothing to learn is"),
    ("no chat", CHATS, "rows.jsonl", lines({"conversations": []}), "no column 'chat'; the row has 'conversations'"),
    ("no messages", CHATS, "rows.jsonl", lines({"chat": []}), "column 'chat' is an empty list of messages"),
    ("chat as text", CHATS, "rows.jsonl", lines({"chat": "Why?"}), "'chat' is text but not a JSON list of messages"),
    ("nothing said", CHATS, "rows.jsonl", lines({"chat": [{"role": "user"}]}), "lacks text in 'role' or 'content'"),
    ("no answer", CHATS, "rows.jsonl", lines({"chat": [USER]}), "no message of the role 'assistant'"),
    ("ShareGPT", CHATS, "rows.jsonl", lines({"chat": [{"from": "tool", "value": "7"}]}), "form of ShareGPT, and '"),
    ("bad mark", CHATS, "rows.jsonl", lines({"chat": [USER, ASSISTANT | {"train": 2}]}), "'train' is 2"),
    ("all marked", CHATS, "rows.jsonl", lines({"chat": [USER, ASSISTANT | {"train": False}]}), "no message is left to"),
    ("empty answer", CHATS, "rows.jsonl", lines({"chat": [USER, EMPTY, USER, ASSISTANT]}), "message 2 is an empty"),
    ("no tools", TOOLS, "rows.jsonl", lines({"chat": [USER, ASSISTANT]}), "no column 'tools'"),
    ("tools as text", TOOLS, "rows.jsonl", lines({"chat": [USER, ASSISTANT], "tools": "f"}), "'tools' is text but not"),
    ("whitespace", PAIRS, "rows.jsonl", lines(GOOD | {"bad": " Seven."}), "differ only in the whitespace around"),
    ("equal when cut", SHORT_PAIRS, "rows.jsonl", lines(EQUAL_WHEN_CUT), "are the same within dataset.maxLength"),
    ("blank text", TEXT, "rows.jsonl", lines({"t": " "}), r"rows\.jsonl:1: the text is empty"),
    ("no words", WORDS, "rows.jsonl", lines({"words": ["a"], "l": ["O"]}), "no column 't'; the row has 'words', 'l'"),
    ("words as text", WORDS, "rows.jsonl", lines({"t": "a", "l": ["O"]}), "'t' is a str, not a list"),
    ("no labels", WORDS, "rows.jsonl", lines({"t": ["a"], "l": None}), "column 'l' is null, not a list"),
    ("no label", LABELS, "rows.jsonl", lines({"t": "a"}), "no column 'l'; the row has 't'"),
    ("CSV cut short", ANSWERS, "rows.csv", b"q,a\nHow,7\nWh", r"rows\.csv:3: 1 field, but .* cut short, copy it again"),
    ("CSV cut in quotes", ANSWERS, "rows.csv", b'q,a\nHow,"7', r"rows\.csv:2: invalid CSV.* cut short, copy it again"),
    ("another format", ANSWERS, "rows.txt", b"How many?", "unknown format"),
]  # fmt: skip


def checked(path: Path, text: TextOptions, tokenizer: PreTrainedTokenizerBase, max_rows: int | None) -> CheckedRows:
    return check_rows([path], PrepareOptions(text), tokenizer, max_rows=max_rows)


@pytest.mark.parametrize(("text", "name", "content", "message"), [case[1:] for case in BAD], ids=[c[0] for c in BAD])
def test_rows_are_refused_with_the_message_of_shard(
    text: TextOptions,
    name: str,
    content: bytes,
    message: str,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(JobError, match=message) as refused:
        prepare([path], tmp_path / "out", PrepareOptions(text, processes=1), tokenizer)
    assert checked(path, text, tokenizer, None).problems == (str(refused.value),)
    assert checked(path, text, tokenizer, 1000).problems == (str(refused.value),)


def test_a_missing_source_is_refused_with_the_message_of_shard(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    found = checked(tmp_path / "rows.jsonl", ANSWERS, tokenizer, 1000)
    (problem,) = found.problems
    assert problem.startswith(f"no file or folder matches {tmp_path / 'rows.jsonl'}: correct the path or pattern")


def test_types_of_columns_are_compared_between_files(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for number, value in enumerate(["7", 7]):
        parquet.write_table(pyarrow.Table.from_pylist([GOOD | {"a": value}]), tmp_path / f"{number}.parquet")
    (problem,) = checked(tmp_path, ANSWERS, tokenizer, 1).problems
    assert "1.parquet" in problem


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_bytes(lines(*rows))
    return path


def test_several_bad_rows_are_collected(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [GOOD | {"a": ""} if n % 3 == 0 else GOOD for n in range(10)])
    found = checked(path, ANSWERS, tokenizer, None)
    assert [problem.partition(": ")[0] for problem in found.problems] == [f"{path}:{n}" for n in (1, 4, 7, 10)]
    assert (found.rows, found.complete) == (10, True)


def test_reading_ends_after_a_few_bad_rows(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [GOOD | {"a": ""}] * 5000)
    found = checked(path, ANSWERS, tokenizer, None)
    assert (len(found.problems), found.rows, found.complete) == (MAX_PROBLEMS, MAX_PROBLEMS, False)


@pytest.mark.parametrize(("max_rows", "rows", "complete", "problems"), [
    (None, 601, True, 1),
    (601, 601, False, 1),
    (600, 600, False, 0),
    (1, 1, False, 0),
])  # fmt: skip
def test_only_the_first_rows_are_checked(
    max_rows: int | None,
    rows: int,
    complete: bool,
    problems: int,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "rows.jsonl", [*[GOOD] * 600, GOOD | {"a": ""}])
    found = checked(path, ANSWERS, tokenizer, max_rows)
    assert (found.rows, found.complete, len(found.problems)) == (rows, complete, problems)


def test_rows_that_shards_would_leave_out_are_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [GOOD, GOOD | {"q": "why " * 99}, GOOD])
    options = PrepareOptions(ANSWERS, processes=1, max_skipped=2)
    found = check_rows([path], options, tokenizer)
    dropped = prepare([path], tmp_path / "out", options, tokenizer).manifest
    assert found.left_out == dropped["splits"]["train"]["dropped"] == 1
    assert found.problems == ()
    write(path, [GOOD | {"q": "why " * 99}] * 2)
    only_long = check_rows([path], options, tokenizer, max_rows=1)
    assert (only_long.left_out, only_long.problems) == (1, ()), "later rows may have something to learn"
    (problem,) = check_rows([path], options, tokenizer).problems
    assert problem.startswith(f"no row of train has a token that carries loss: {path}:1: ")


@pytest.mark.parametrize("allowed", [0, 2, 3])
def test_turns_that_the_template_loses_are_allowed_up_to_max_skipped(
    allowed: int, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [*[{"chat": [USER, CALL]}] * 3, {"chat": [USER, ASSISTANT]}])
    found = check_rows([path], PrepareOptions(CHATS, max_skipped=allowed), tokenizer)
    assert len(found.problems) == 3 - allowed
    assert found.rows == 4


def test_progress_is_reported(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    seen: list[int] = []
    check_rows([write(tmp_path / "rows.jsonl", [GOOD] * 2500)], PrepareOptions(ANSWERS), tokenizer, report=seen.append)
    assert seen == [1000, 2000]
