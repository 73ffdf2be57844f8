"""Rows with an answer and whether it is desirable: their documents, tokens and batches, and which rows are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune.prompting.template import RowError
from spotune_trainer.data.batches import NO_LOSS, Row, collate, row_hash
from spotune_trainer.data.preparation.lengths import measure_lengths
from spotune_trainer.data.preparation.prepare import PreparedDataset, PrepareOptions, prepare
from spotune_trainer.data.preparation.preview import preview_row
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from tests.trainer.data.preparation.test_prepare import read, write_jsonl
from tests.trainer.data.test_pairs import chat

TEXT = TextOptions("causal", prompt="Q: {q} A:", completion=" {a}", label="{good}", max_length=64)
CHAT = TextOptions("causal", messages="chat", label="{good}", max_length=64)
ROWS: list[dict[str, Any]] = [
    {"q": "how many", "a": "select count", "good": True},
    {"q": "how many", "a": "singer", "good": False},
    {"q": "which", "a": "select name", "good": "1"},
]


def shards(
    options: TextOptions,
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    max_skipped: int = 0,
) -> tuple[list[Row], PreparedDataset]:
    source = write_jsonl(folder / "answers.jsonl", rows)
    settings = PrepareOptions(options, processes=1, max_skipped=max_skipped)
    prepared = prepare([source], folder / "out", settings, tokenizer)
    return list(read(folder / "out", folder)), prepared


def texts(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Of both documents of a row, all of its text, and the text with loss."""
    middle = int(row["pair_lengths"][0])
    return [
        (
            str(tokenizer.decode(row["input_ids"][part].tolist())),
            str(tokenizer.decode([token for token in row["labels"][part].tolist() if token != NO_LOSS])),
        )
        for part in (slice(middle), slice(middle, None))
    ]


def test_a_row_has_the_answer_of_the_next_row_with_another_prompt(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows, prepared = shards(TEXT, ROWS, tokenizer, tmp_path)
    assert [texts(row, tokenizer) for row in rows] == [
        [
            ("Q: how many A: select count</s>", " select count</s>"),
            ("Q: how many A: select name</s>", " select name</s>"),
        ],
        [("Q: how many A: singer</s>", " singer</s>"), ("Q: how many A: select name</s>", " select name</s>")],
        [("Q: which A: select name</s>", " select name</s>"), ("Q: which A: select count</s>", " select count</s>")],
    ]
    assert [int(row["desirable"]) for row in rows] == [1, 0, 1]
    own_labels = sum(int((row["labels"][: int(row["pair_lengths"][0])] != NO_LOSS).sum()) for row in rows)
    assert prepared.manifest["splits"]["train"]["lossTokens"] == own_labels


def test_rows_of_one_prompt_have_the_answer_of_the_next_row(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows, _ = shards(TEXT, ROWS[:2], tokenizer, tmp_path)
    assert [texts(row, tokenizer)[1][1] for row in rows] == [" singer</s>", " select count</s>"]


def test_the_last_row_of_a_part_has_another_answer_than_its_own(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    given = [{"q": f"number {number}", "a": f"n{number}", "good": True} for number in range(257)]
    rows, _ = shards(TEXT, given, tokenizer, tmp_path)  # 256 documents are tokenized at a time
    own, other = zip(*([part[1] for part in texts(row, tokenizer)] for row in rows), strict=True)
    assert all(own[number] != other[number] for number in range(257))
    assert all(another == following for another, following in zip(other[:255], own[1:], strict=False))


def test_the_answer_of_a_chat_is_its_last_message(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    given = [
        {"chat": chat("ten") + chat("select count", "and now"), "good": 1},
        {"chat": chat("singer", "which"), "good": 0},
    ]
    rows, _ = shards(CHAT, given, tokenizer, tmp_path)
    first, second = "<|user|>how many</s><|assistant|>ten</s><|user|>and now</s><|assistant|>", "<|user|>which</s>"
    assert texts(rows[0], tokenizer) == [
        (f"{first}select count</s>", "select count</s>"),
        (f"{first}singer</s>", "singer</s>"),
    ]
    assert texts(rows[1], tokenizer)[1] == (f"{second}<|assistant|>select count</s>", "select count</s>")


@pytest.mark.parametrize(
    ("options", "row", "problem"),
    [
        (TEXT, ROWS[0] | {"good": "maybe"}, r"the label \{good\} is 'maybe': it says whether the answer is desirable"),
        (TEXT, ROWS[0] | {"good": 2}, r"the label \{good\} is '2'.*correct the row, or dataset\.label of the job"),
        (TEXT, ROWS[0] | {"good": None}, "column 'good' is null"),
        (TEXT, {"q": "how", "a": "ten"}, "no column 'good'"),
        (TEXT, ROWS[0] | {"a": " "}, r"the completion is empty: remove the row, or correct it or dataset\.completion"),
        (CHAT, {"chat": chat("ten", train=False), "good": 1}, "the answer is empty"),
    ],
)
def test_rows_without_a_label_or_an_answer_are_refused(
    tokenizer: PreTrainedTokenizerBase, options: TextOptions, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RowError, match=problem):
        RowRenderer(options, tokenizer).render(row)


@pytest.mark.parametrize(
    ("value", "desirable"), [(True, True), ("True", True), (1, True), (" FALSE ", False), (0, False)]
)
def test_labels_are_truth_values_numbers_or_text(
    tokenizer: PreTrainedTokenizerBase, value: Any, desirable: bool
) -> None:
    assert RowRenderer(TEXT, tokenizer).render(ROWS[0] | {"good": value}).desirable is desirable


def test_an_error_names_file_and_line(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"answers\.jsonl:2: the label \{good\} is 'good'"):
        shards(TEXT, [ROWS[0], ROWS[1] | {"good": "good"}], tokenizer, tmp_path)


def test_lengths_and_previews_are_those_of_the_answer_alone(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows, prepared = shards(TEXT, ROWS, tokenizer, tmp_path)
    own = [int(row["pair_lengths"][0]) for row in rows]
    lengths = measure_lengths([tmp_path / "answers.jsonl"], TEXT, tokenizer)
    assert (lengths.input.tokens, lengths.input.percentiles["max"]) == (sum(own), max(own))
    assert sum(prepared.manifest["splits"]["train"]["inputLengths"].values()) == len(rows)
    preview = preview_row([tmp_path / "answers.jsonl"], 2, TEXT, tokenizer)
    assert [(span.text, span.trained) for span in preview.spans] == [("Q: how many A:", False), (" singer</s>", True)]
    assert preview.tokens == own[1]
    assert preview.desirable is False


def test_a_row_whose_prompt_fills_it_is_dropped_and_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    long = {"q": "zz" * 80, "a": "ten", "good": True}
    with pytest.raises(JobError, match=r"answers\.jsonl:4: nothing to learn is left within dataset\.maxLength"):
        shards(TEXT, [*ROWS, long], tokenizer, tmp_path)
    rows, prepared = shards(TEXT, [*ROWS, long], tokenizer, tmp_path, max_skipped=1)
    counts = prepared.manifest["splits"]["train"]
    assert (len(rows), counts["documents"], counts["dropped"], counts["truncated"]) == (3, 4, 1, 1)


def test_a_batch_has_both_documents_in_rows_of_their_own(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows, _ = shards(TEXT, ROWS, tokenizer, tmp_path)
    reference = np.arange(6, dtype=np.float32).reshape(3, 2)
    batch = collate(rows, "causal", 0, [4, 5, 6], pad_to_multiple_of=8, reference_log_probs=reference).to("cpu")
    assert batch.mismatched is not None
    assert batch.desirable is not None
    assert batch.reference_log_probs is not None
    assert batch.desirable.tolist() == [True, False, True]
    assert batch.reference_log_probs.tolist() == reference.tolist()
    for row, own, mismatched in zip(rows, batch.input_ids.tolist(), batch.mismatched.input_ids.tolist(), strict=True):
        middle, last = np.cumsum(row["pair_lengths"]).tolist()
        for padded, (start, stop) in zip((own, mismatched), pairwise((0, middle, last)), strict=True):
            assert padded[: stop - start] == row["input_ids"][start:stop].tolist()
            assert set(padded[stop - start :]) <= {0}
            assert len(padded) % 8 == 0
    assert batch.position_ids is None, "documents are not packed, so no attention mask is needed"
    assert batch.tokens == sum(len(row["input_ids"]) for row in rows)
    assert batch.row_hashes() == [row_hash(sample_id, row) for sample_id, row in zip((4, 5, 6), rows, strict=True)]
