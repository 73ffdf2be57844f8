"""Rows with pairs of answers: what their documents, tokens and batches are, and which rows are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune.prompting.template import RowError
from spotune_trainer.data.batches import NO_LOSS, collate
from spotune_trainer.data.preparation.lengths import measure_lengths
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.rows.documents import TokenizedDocument
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.pairs import split_pair
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from tests.trainer.data.chat.support.conversations import tokenizer_with
from tests.trainer.data.preparation.test_prepare import read, write_jsonl

TEXT = TextOptions("causal", prompt="Q: {q} A:", chosen=" {good}", rejected=" {bad}", max_length=64)
CHAT = TextOptions("causal", chosen="{good}", rejected="{bad}", max_length=64)
ROW = {"q": "how many", "good": "select count", "bad": "singer"}


def chat(answer: str, question: str = "how many", **flags: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **flags}]


def tokenize(options: TextOptions, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> TokenizedDocument:
    document = RowRenderer(options, tokenizer).render(row)
    (tokens,) = DocumentTokenizer(options, tokenizer).tokenize([document])
    return tokens


def texts(tokens: TokenizedDocument, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Of each answer of a pair, all of its text, and the text with loss."""
    return [
        (
            str(tokenizer.decode(answer.input_ids.tolist())),
            str(tokenizer.decode([token for token in answer.labels.tolist() if token != NO_LOSS])),
        )
        for answer in split_pair(tokens)
    ]


def test_both_answers_follow_the_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    pair = tokenize(TEXT, tokenizer, ROW)
    assert texts(pair, tokenizer) == [
        ("Q: how many A: select count</s>", " select count</s>"),
        ("Q: how many A: singer</s>", " singer</s>"),
    ]


def test_chats_differ_in_their_last_message(tokenizer: PreTrainedTokenizerBase) -> None:
    earlier = chat("ten")
    row = {"good": earlier + chat("select count", "and now"), "bad": earlier + chat("singer", "and now")}
    pair = tokenize(CHAT, tokenizer, row)
    before = "<|user|>how many</s><|assistant|>ten</s><|user|>and now</s><|assistant|>"
    assert texts(pair, tokenizer) == [
        (f"{before}select count</s>", "select count</s>"),
        (f"{before}singer</s>", "singer</s>"),
    ]


@pytest.mark.parametrize(
    ("options", "row", "problem"),
    [
        (TEXT, ROW | {"bad": "select count"}, "chosen and rejected are the same answer"),
        (TEXT, ROW | {"bad": "select count \n"}, "differ only in the whitespace around the answer: remove the row"),
        (CHAT, {"good": chat("ten"), "bad": chat(" ten")}, "differ only in the whitespace around the answer"),
        (TEXT, ROW | {"good": " "}, "chosen is an empty answer: remove the row, or correct it"),
        (TEXT, {"q": "how many", "good": "ten"}, "no column 'bad'"),
        (CHAT, {"good": chat("ten"), "bad": chat("two", "which")}, "answer different prompts"),
        (CHAT, {"good": chat("ten", train=False), "bad": chat("two")}, "chosen is an empty answer"),
        (CHAT, {"good": "ten", "bad": chat("two")}, "column 'good' is text but not a JSON list of messages"),
    ],
)
def test_rows_that_teach_nothing_are_refused(
    tokenizer: PreTrainedTokenizerBase, options: TextOptions, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RowError, match=problem):
        RowRenderer(options, tokenizer).render(row)


def test_pairs_that_differ_in_whitespace_within_the_answer_are_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    pair = tokenize(TEXT, tokenizer, ROW | {"bad": "select\n  count"})
    assert pair.pair_lengths is not None


def test_pairs_of_chats_may_have_tools() -> None:
    tools_tokenizer = tokenizer_with("trl/qwen3", "<|im_start|> <|im_end|> <|endoftext|>", "<|im_end|>")
    options = TextOptions("causal", chosen="{good}", rejected="{bad}", tools="tools", max_length=512)
    tool = {"type": "function", "function": {"name": "count_singers", "parameters": {"type": "object"}}}
    row = {"good": chat("ten"), "bad": chat("two"), "tools": [tool]}
    chosen, rejected = texts(tokenize(options, tools_tokenizer, row), tools_tokenizer)
    for text, answer in (chosen, rejected):
        assert "count_singers" in text
        assert "count_singers" not in answer
    with pytest.raises(RowError, match=r"no column 'tools'.*dataset\.tools of the job"):
        RowRenderer(options, tools_tokenizer).render({"good": chat("ten"), "bad": chat("two")})


def test_tools_are_for_chats() -> None:
    with pytest.raises(ValueError, match="tools is for chats"):
        TextOptions("causal", prompt="{q}", chosen="{good}", rejected="{bad}", tools="tools")


def test_answers_that_are_chats_are_named_by_one_column(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="without prompt, chosen and rejected are columns with chats"):
        RowRenderer(TextOptions("causal", chosen="{a}: {b}", rejected="{c}"), tokenizer)


def test_a_pair_is_one_row_of_the_shards(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "pairs.jsonl", [ROW, ROW | {"q": "which"}])
    prepared = prepare([source], tmp_path / "out", PrepareOptions(TEXT, processes=1), tokenizer)
    first, _ = read(tmp_path / "out", tmp_path)
    expected = tokenize(TEXT, tokenizer, ROW)
    assert np.array_equal(first["input_ids"], expected.input_ids)
    assert np.array_equal(first["labels"], expected.labels)
    assert first["pair_lengths"].sum() == len(first["input_ids"])
    assert prepared.manifest["splits"]["train"]["samples"] == 2


def test_pairs_that_are_the_same_within_the_maximum_length_are_dropped_and_counted(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [ROW, ROW | {"good": "zz" * 60, "bad": "zz" * 61}]
    source = write_jsonl(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(JobError, match=r"pairs\.jsonl:2: chosen and rejected are the same within dataset\.maxLength"):
        prepare([source], tmp_path / "out", PrepareOptions(TEXT, processes=1), tokenizer)
    prepared = prepare([source], tmp_path / "out", PrepareOptions(TEXT, processes=1, max_skipped=1), tokenizer)
    counts = prepared.manifest["splits"]["train"]
    assert (counts["documents"], counts["samples"], counts["dropped"], counts["truncated"]) == (2, 1, 1, 1)
    assert list(counts["leftOut"]) == ["equal"]


def test_an_error_names_file_and_line(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "pairs.jsonl", [ROW, ROW | {"bad": ""}])
    with pytest.raises(JobError, match=r"pairs\.jsonl:2: rejected is an empty answer"):
        prepare([source], tmp_path / "out", PrepareOptions(TEXT, processes=1), tokenizer)


CALL: dict[str, Any] = {"tool_calls": [{"function": {"name": "count", "arguments": {"of": "singers"}}}]}
"""What the tokenizer's chat template does not render."""


@pytest.mark.parametrize("name", ["good", "bad"])
def test_pairs_that_the_template_cannot_say_count_towards_max_skipped(
    name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    row = {"good": chat("ten"), "bad": chat("two")}
    source = write_jsonl(tmp_path / "pairs.jsonl", [row, row | {name: chat("five", **CALL)}])
    answer = {"good": "chosen", "bad": "rejected"}[name]
    with pytest.raises(JobError, match=rf"pairs\.jsonl:2: {answer}: .*raise dataset\.maxSkipped"):
        prepare([source], tmp_path / "out", PrepareOptions(CHAT, processes=1), tokenizer)
    options = PrepareOptions(CHAT, processes=1, max_skipped=1)
    counts = prepare([source], tmp_path / "out", options, tokenizer).manifest["splits"]["train"]
    assert (counts["documents"], counts["samples"], counts["dropped"]) == (2, 1, 1)
    assert counts["turns"] == {"trained": 1, "notRendered": 1}
    assert counts["problems"][0].startswith(f"{source}:2: {answer}: ")


def test_the_length_of_a_pair_is_that_of_its_longer_answer(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "pairs.jsonl", [ROW])
    longest = max(len(answer.input_ids) for answer in split_pair(tokenize(TEXT, tokenizer, ROW)))
    assert measure_lengths([source], TEXT, tokenizer).input.percentiles["max"] == longest


def test_a_batch_separates_the_answers_of_a_pair() -> None:
    ids, labels = np.array([5, 6, 7, 5, 8, 9, 9]), np.array([-100, 6, 7, -100, 8, 9, 9])
    rows = [
        {"input_ids": ids, "labels": labels, "pair_lengths": np.array([3, 4])},
        {"input_ids": ids[:6], "labels": labels[:6], "pair_lengths": np.array([3, 3])},
    ]
    batch = collate(rows, "causal", 0, reference_log_probs=np.ones((2, 2), dtype=np.float32)).to("cpu")
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 0]]
    assert batch.pairs is not None
    assert batch.pairs.rows.tolist() == [0, 1]
    assert batch.pairs.starts.tolist() == [[0, 3], [0, 3]]
    assert batch.pairs.lengths.tolist() == [[3, 4], [3, 3]]
    assert batch.reference_log_probs is not None
    assert batch.reference_log_probs.shape == (2, 2)
