"""Lengths of rows: what they say will be cut is what `prepare` cuts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError, UsageError
from spotune_trainer.data.preparation.lengths import LengthSummary, collect_lengths, measure_lengths
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.rows.options import TextOptions
from tests.trainer.data.chat.support.conversations import CONVERSATIONS, conversation_row, tokenizer_with

WORDS = [3, 8, 20, 41, 90, 8]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Questions and answers of very different lengths; the last row repeats the second one."""
    path = tmp_path / "rows.jsonl"
    lines = [{"question": "how many " * count, "answer": "select " * (count // 2)} for count in WORDS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def shards(
    rows: Path, options: TextOptions, tokenizer: PreTrainedTokenizerBase, max_skipped: int = 0
) -> dict[str, Any]:
    """The counts of the manifest that `prepare` writes."""
    settings = PrepareOptions(options, processes=1, max_skipped=max_skipped)
    prepared = prepare([rows], rows.parent / "shards", settings, tokenizer)
    (counts,) = prepared.manifest["splits"].values()
    found: dict[str, Any] = counts
    return found


def now(summary: LengthSummary) -> tuple[int, int, int]:
    """What the job's own maximum length cuts."""
    (cut,) = (cut for cut in summary.cuts if cut.limit == summary.limit)
    return cut.rows, cut.tokens, cut.trained_tokens


@pytest.mark.parametrize("max_length", [64, 100, 256])
def test_what_is_cut_is_what_the_shards_lack(max_length: int, rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    options = TextOptions("causal", "{question}", "{answer}", max_length=max_length)
    found = measure_lengths([rows], options, tokenizer)
    counts = shards(rows, options, tokenizer, max_skipped=2)
    cut_rows, cut_tokens, cut_trained = now(found.input)
    assert cut_rows > 0
    assert (cut_rows, cut_tokens) == (counts["truncated"], counts["cutTokens"])
    assert found.input.tokens == counts["tokens"] + counts["droppedTokens"] + cut_tokens
    assert found.input.trained_tokens - cut_trained == counts["lossTokens"]
    assert cut_trained == counts["cutLossTokens"]
    assert {str(bound): rows for bound, rows in found.input.histogram.items()} == counts["inputLengths"]


def test_lengths_do_not_depend_on_the_limit_of_the_job(rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    short, long = (
        measure_lengths([rows], TextOptions("causal", "{question}", "{answer}", max_length=limit), tokenizer).input
        for limit in (16, 4096)
    )
    assert (short.tokens, short.percentiles, short.histogram) == (long.tokens, long.percentiles, long.histogram)
    assert {cut.limit: cut for cut in short.cuts}[128] == {cut.limit: cut for cut in long.cuts}[128]
    assert now(long) == (0, 0, 0)


def test_percentiles_and_bars_are_those_of_the_lengths(rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = measure_lengths([rows], TextOptions("causal", text="question"), tokenizer)
    texts = [json.loads(line)["question"] for line in rows.read_text().splitlines()]
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]  # and the end-of-text token
    assert found.input.tokens == found.input.trained_tokens == sum(lengths)
    assert found.input.mean == round(float(np.mean(lengths)), 1)
    assert found.input.percentiles == {
        "p50": sorted(lengths)[2], "p90": max(lengths), "p95": max(lengths), "p99": max(lengths), "max": max(lengths)
    }  # fmt: skip
    for bound, count in found.input.histogram.items():
        assert count == sum(bound // 2 < length <= bound for length in lengths)
    assert sum(found.input.histogram.values()) == len(lengths)


def test_inputs_and_targets_of_a_seq2seq_model_are_apart(rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    options = TextOptions("seq2seq", "{question}", "{answer}", max_length=100, max_completion_length=20)
    found = measure_lengths([rows], options, tokenizer)
    assert found.target is not None
    assert (found.input.limit, found.target.limit) == (100, 20)
    assert found.input.trained_tokens == 0
    assert found.target.trained_tokens == found.target.tokens > 0
    assert 0 < now(found.target)[0] <= len(WORDS)


def test_packed_plain_text_is_not_cut(rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = measure_lengths([rows], TextOptions("causal", text="question", packing=True, max_length=16), tokenizer)
    assert found.input.limit is None


def test_equal_rows_are_counted(rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = measure_lengths([rows], TextOptions("causal", text="question"), tokenizer)
    assert (found.rows, found.duplicates) == (len(WORDS), 1)


def test_the_first_rows_can_stand_for_all(rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    read: list[int] = []
    found = measure_lengths([rows], TextOptions("causal", text="question"), tokenizer, max_rows=2, report=read.append)
    assert (found.rows, read) == (2, [2])


def test_a_wrong_row_is_named(rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows.write_text(rows.read_text() + '{"question": "no answer"}\n')
    with pytest.raises(JobError, match=f"{rows}:{len(WORDS) + 1}: .*answer"):
        measure_lengths([rows], TextOptions("causal", "{question}", "{answer}"), tokenizer)


def test_answers_that_the_template_loses_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(conversation_row(name))}\n" for name in CONVERSATIONS))
    loses_calls = tokenizer_with("trl/llama3", "<|eot_id|>", "<|eot_id|>")
    found = collect_lengths([path], TextOptions("causal", messages="chat", tools="tools"), loses_calls)
    assert found.rows == sum(found.input.rows_by_length.values()) == len(CONVERSATIONS)
    assert found.left_out.total() >= len(found.problems) > 0
    assert all(problem.startswith(f"{path}:4: ") for problem in found.problems if "tool call" in problem)


def test_no_rows_is_an_error(rows: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows.write_text("\n")
    with pytest.raises((UsageError, JobError), match="no rows"):
        measure_lengths([rows], TextOptions("causal", text="question"), tokenizer)
