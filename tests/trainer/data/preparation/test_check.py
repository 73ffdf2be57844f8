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
CHATS = TextOptions("causal", messages="chat")
LABELS = TextOptions("causal", text="{t}", label="{l}", labels=("no", "yes"))
WORDS = TextOptions("causal", text="{t}", label="{l}", labels=("O", "B-X"), label_each_word=True)
LABELLED_ANSWERS = TextOptions("causal", "{q}", "{a}", label="{l}")
RELATED = TextOptions("causal", query="{q}", positive="{a}")
GOOD = {"q": "How many?", "a": "Seven.", "good": "Seven.", "bad": "Why?", "t": "text", "l": "yes"}
USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
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
    ("cut CSV row", ANSWERS, "rows.csv", b"q,a\nHow,7\nWhy\n", r"rows\.csv:3: 1 fields, but the header names 2"),
    ("CSV column", ANSWERS, "rows.csv", b"q,b\nHow,7\n", r"rows\.csv:1: no column 'a'"),
    ("no Parquet", ANSWERS, "rows.parquet", b"PAR1", "not a Parquet file"),
    ("no rows", ANSWERS, "rows.jsonl", b"\n", "the input has no rows"),
    ("long prompts", ANSWERS, "rows.jsonl", lines(GOOD | {"q": "why " * 99}), "no row of train has a token"),
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
    assert found.problems == (f"no file or folder matches {tmp_path / 'rows.jsonl'}",)


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
    found = checked(path, ANSWERS, tokenizer, None)
    dropped = prepare([path], tmp_path / "out", PrepareOptions(ANSWERS, processes=1), tokenizer).manifest
    assert found.left_out == dropped["splits"]["train"]["dropped"] == 1
    assert found.problems == ()
    only_long = checked(write(path, [GOOD | {"q": "why " * 99}] * 2), ANSWERS, tokenizer, 1)
    assert (only_long.left_out, only_long.problems) == (1, ()), "later rows may have something to learn"


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
