"""Rows of texts with embeddings: their tokens, shards and batches, and which rows are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune.prompting.template import RowError
from spotune_trainer.data.batches import collate, row_hash
from spotune_trainer.data.preparation.lengths import measure_lengths
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.preparation.preview import preview_row
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from tests.trainer.data.preparation.test_prepare import read, write_jsonl

TEXTS = TextOptions("causal", query="query: {q}", positive="{p}", negative="{n}", max_length=16)
ROWS: list[dict[str, Any]] = [
    {"q": "how many", "p": "select count", "n": "singer"},
    {"q": "which", "p": "name", "n": "singer " * 20},
]


def test_a_row_has_each_text_as_the_tokenizer_encodes_it(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    prepared = prepare([source], tmp_path / "out", PrepareOptions(TEXTS, processes=1), tokenizer)
    rows = read(tmp_path / "out", tmp_path)
    assert len(rows) == len(ROWS)
    for raw, row in zip(ROWS, rows, strict=True):
        texts = np.split(row["input_ids"], np.cumsum(row["text_lengths"])[:-1])
        expected = [f"query: {raw['q']}", raw["p"], raw["n"]]
        encoded = tokenizer(expected, truncation=True, max_length=16)["input_ids"]
        assert [text.tolist() for text in texts] == encoded
    assert rows[1]["text_lengths"][2] == 16
    counts = prepared.manifest["splits"]["train"]
    assert (counts["samples"], counts["truncated"], counts["dropped"]) == (2, 1, 0)


def test_an_empty_text_is_refused_by_file_and_line(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", [ROWS[0], ROWS[1] | {"n": " "}])
    with pytest.raises(JobError, match=r"texts\.jsonl:2: negative is an empty text: remove the row, or correct it"):
        prepare([source], tmp_path / "out", PrepareOptions(TEXTS, processes=1), tokenizer)


@pytest.mark.parametrize(("missing", "field"), [("q", "query"), ("p", "positive"), ("n", "negative")])
def test_a_missing_column_names_the_field_that_reads_it(
    tokenizer: PreTrainedTokenizerBase, missing: str, field: str
) -> None:
    row = {name: value for name, value in ROWS[0].items() if name != missing}
    with pytest.raises(RowError, match=rf"no column '{missing}'.*correct the row, or dataset\.{field} of the job"):
        RowRenderer(TEXTS, tokenizer).render(row)


def test_the_length_of_a_row_is_that_of_its_longest_text(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", ROWS[:1])
    longest = max(len(ids) for ids in tokenizer(["query: how many", "select count", "singer"])["input_ids"])
    assert measure_lengths([source], TEXTS, tokenizer).input.percentiles["max"] == longest


def test_a_preview_has_all_texts(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    preview = preview_row([source], 1, TEXTS, tokenizer)
    shown = {name: "".join(span.text for span in spans) for name, spans in preview.texts.items()}
    assert shown == {"query": "query: how many", "positive": "select count", "negative": "singer"}


def test_a_batch_has_the_texts_of_all_samples_by_kind(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    prepare([source], tmp_path / "out", PrepareOptions(TEXTS, processes=1), tokenizer)
    rows = read(tmp_path / "out", tmp_path)
    batch = collate(rows, "causal", 0, [7, 8]).to("cpu")
    assert batch.texts == 3
    assert batch.attention_mask is not None
    lengths = np.stack([row["text_lengths"] for row in rows]).T.flatten()
    assert batch.attention_mask.sum(1).tolist() == batch.input_lengths.tolist() == lengths.tolist()
    assert tokenizer.decode(batch.input_ids[3], skip_special_tokens=True) == "name"
    assert batch.sample_ids.tolist() == [7, 8]
    assert batch.row_hashes() == [row_hash(7, rows[0]), row_hash(8, rows[1])]
