"""Rows that are left out whole: refused up to `maxSkipped`, counted by reason, and named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.rows.options import TextOptions
from tests.trainer.data.preparation.test_prepare import OPTIONS, write_jsonl

pytestmark = pytest.mark.slow

LONG = TextOptions("causal", "{q}", "{a}", max_length=8)


def test_rows_without_loss_are_refused_unless_they_may_be_left_out(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "how", "a": "y"}, *[{"q": "zz" * 50, "a": "x"}] * 7])
    options = dataclasses.replace(OPTIONS, text=LONG)
    with pytest.raises(JobError) as refused:
        prepare([path], tmp_path / "out", options, tokenizer)
    message = str(refused.value)
    places = [
        f"{path}:{line}: nothing to learn is left within dataset.maxLength (8 of 102 tokens)" for line in range(2, 7)
    ]
    assert message.startswith(f"5 rows cannot be trained on (dataset.maxSkipped: 0): {'; '.join(places)}. ")
    assert message.endswith("Raise dataset.maxLength, or raise dataset.maxSkipped to leave such rows out")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(JobError, match=r"7 rows cannot be trained on \(dataset.maxSkipped: 6\)"):
        prepare([path], tmp_path / "out", dataclasses.replace(options, max_skipped=6), tokenizer)
    prepared = prepare([path], tmp_path / "out", dataclasses.replace(options, max_skipped=7), tokenizer)
    counts = prepared.manifest["splits"]["train"]
    assert (counts["documents"], counts["samples"], counts["truncated"], counts["dropped"]) == (8, 1, 7, 7)
    assert counts["leftOut"] == {"cut": {"rows": 7, "tokens": 7 * 8}}
    assert counts["cutLossTokens"] == 7 * 2
    assert counts["problems"] == places
    with pytest.raises(JobError, match="7 rows cannot be trained on"):  # also if the dataset exists
        prepare([path], tmp_path / "out", options, tokenizer)


def test_rows_left_out_are_counted_over_all_parts(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "how", "a": "y"}, {"q": "zz" * 50, "a": "x"}] * 20)
    options = dataclasses.replace(OPTIONS, text=LONG, part_size=300, max_skipped=19)
    with pytest.raises(
        JobError, match=r"20 rows cannot be trained on \(dataset.maxSkipped: 19\): .*a.jsonl:2: .*:10: "
    ):
        prepare([path], tmp_path / "out", options, tokenizer)
    assert not prepare([path], tmp_path / "out", dataclasses.replace(options, max_skipped=20), tokenizer).reused


def test_rows_of_which_none_is_learned_are_refused_even_if_they_may_be_left_out(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "zz" * 50, "a": "x"}])
    options = dataclasses.replace(OPTIONS, text=LONG, max_skipped=9)
    with pytest.raises(
        JobError, match=r"no row of train has a token that carries loss: .*a.jsonl:1: .*Raise dataset.max"
    ):
        prepare([path], tmp_path / "out", options, tokenizer)


def test_blank_texts_are_refused_unless_they_may_be_left_out(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"t": "how many"}, {"t": " \n"}, {"t": ""}])
    for packing in (False, True):
        text = TextOptions("causal", text="t", max_length=8, packing=packing)
        with pytest.raises(
            JobError, match=r"a.jsonl:2: the text is empty.*a.jsonl:3: .*Remove or correct what is empty"
        ):
            prepare([path], tmp_path / "none", PrepareOptions(text, processes=1), tokenizer)
        options = PrepareOptions(text, processes=1, max_skipped=2)
        counts = prepare([path], tmp_path / f"out-{packing}", options, tokenizer).manifest["splits"]["train"]
        assert (counts["documents"], counts["samples"], counts["leftOut"]["empty"]["rows"]) == (3, 1, 2)


def test_datasets_of_earlier_versions_do_not_count_rows_that_were_left_out(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "how", "a": "y"}, {"q": "zz" * 50, "a": "x"}])
    options = dataclasses.replace(OPTIONS, text=LONG)
    prepare([path], tmp_path / "out", dataclasses.replace(options, max_skipped=1), tokenizer)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for name in ("leftOut", "problems", "cutLossTokens"):
        del manifest["splits"]["train"][name]
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    assert prepare([path], tmp_path / "out", options, tokenizer).reused
