"""Rows with labels: which values name a label, which tokens carry it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from spotune.errors import JobError
from spotune.prompting.template import RowError
from spotune_trainer.data.batches import NO_LOSS, collate, row_hash
from spotune_trainer.data.labels.encoding import tokenize_word_list
from spotune_trainer.data.labels.positions import LabelIds, read_word_labels
from spotune_trainer.data.preparation.lengths import measure_lengths
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.preparation.preview import preview_row
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.shards import ShardedDataset
from tests.trainer.support.labelled import TAGS, TOPICS, save_wordpiece_tokenizer, sentences, texts, write_rows
from tests.trainer.support.tiny import save_tokenizer

TEXT = TextOptions("causal", text="{text}", label="{label}", labels=TOPICS, max_length=12)
WORDS = TextOptions("causal", text="tokens", label="{tags}", labels=TAGS, label_each_word=True, max_length=9)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """A tokenizer like BERT's, which has no end-of-text token."""
    save_wordpiece_tokenizer(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


def shards(folder: Path, rows: list[Any], options: TextOptions, tokenizer: Any) -> list[dict[str, Any]]:
    """The rows of the shards that raw rows become, and nothing else in them than is needed."""
    write_rows(folder / "rows.jsonl", rows)
    prepare([folder / "rows.jsonl"], folder / "shards", PrepareOptions(options), tokenizer)
    dataset = ShardedDataset(str(folder / "shards"), folder / "cache")
    return [dataset[number] for number in range(len(dataset))]


@pytest.mark.parametrize(
    ("labels", "value", "position"),
    [
        (TOPICS, "sport", 1),
        (TOPICS, 2, 2),
        (TOPICS, "2", 2),
        (("false", "true"), True, 1),
        (("1", "2", "3"), 2, 1),
        (("1", "2", "3"), "3", 2),
        (("-1", "1"), -1, 0),
    ],
)
def test_a_label_is_named_or_counted(labels: tuple[str, ...], value: Any, position: int) -> None:
    assert LabelIds(labels).position(value) == position


@pytest.mark.parametrize(
    ("labels", "value"),
    [
        (TOPICS, "Sport"),
        (TOPICS, 3),
        (TOPICS, -1),
        (TOPICS, None),
        (TOPICS, True),
        (("1", "2"), 0),
        (TOPICS, ["sport"]),
    ],
)
def test_any_other_label_is_refused(labels: tuple[str, ...], value: Any) -> None:
    with pytest.raises(RowError, match=r"is not in dataset.labels \(.*\): correct the row, or add the label"):
        LabelIds(labels).position(value)


def test_a_text_is_encoded_and_cut_as_by_its_tokenizer(tmp_path: Path, tokenizer: Any) -> None:
    rows = shards(tmp_path, texts(), TEXT, tokenizer)
    for raw, row in zip(texts(), rows, strict=True):
        assert row.keys() == {"input_ids", "text_label"}
        assert row["input_ids"].tolist() == tokenizer(raw["text"], truncation=True, max_length=12)["input_ids"]
        assert row["input_ids"][-1] == tokenizer.sep_token_id
        assert TOPICS[row["text_label"]] == raw["label"]
    assert any(len(tokenizer(raw["text"])["input_ids"]) > 12 for raw in texts())


def test_the_first_token_of_a_word_has_its_label(tmp_path: Path, tokenizer: Any) -> None:
    rows = shards(tmp_path, sentences(), WORDS, tokenizer)
    for raw, row in zip(sentences(), rows, strict=True):
        encoded = tokenizer(raw["tokens"], is_split_into_words=True, truncation=True, max_length=9)
        words = encoded.word_ids()
        first = [word is not None and word not in words[:token] for token, word in enumerate(words)]
        expected = [
            TAGS.index(raw["tags"][word]) if is_first else NO_LOSS for word, is_first in zip(words, first, strict=True)
        ]
        assert row["input_ids"].tolist() == encoded["input_ids"]
        assert row["token_labels"].tolist() == expected
    assert any(
        (row["token_labels"] != NO_LOSS).sum() < len(raw["tags"]) for raw, row in zip(sentences(), rows, strict=True)
    )


def test_words_have_the_tokens_of_their_text(tmp_path: Path) -> None:
    byte_level = save_tokenizer(tmp_path)
    words = ["how", "many", "singers", "are", "there", "?"]
    encoded = tokenize_word_list(byte_level, words, 100)
    ids = encoded.input_ids
    assert ids == byte_level("how many singers are there ?")["input_ids"]
    assert encoded.full_length == len(ids)
    assert [str(byte_level.decode([ids[token]])).strip()[:1] for token in encoded.first_tokens.values()] == [
        word[0] for word in words
    ]


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (TEXT, {"label": "musc"}, "the label 'musc' is not in dataset.labels (music, sport, weather): correct"),
        (TEXT, {"text": " "}, "the text is empty: remove the row"),
        (TEXT, {"label": None}, "the label 'null' is not in dataset.labels"),
        (WORDS, {"tags": ["O"]}, "'tokens' has 6 words, but 'tags' has 1 labels: correct the row"),
        (WORDS, {"tokens": [], "tags": []}, "'tokens' has no words: remove the row"),
        (WORDS, {"tokens": "Ann went"}, "column 'tokens' is a str, not a list with an entry for each word"),
        (WORDS, {"tokens": ["Ann", ""], "tags": ["O", "O"]}, "word 2 of 'tokens' is '', not text"),
    ],
)
def test_a_wrong_row_is_named(
    tmp_path: Path, tokenizer: Any, options: TextOptions, change: dict[str, Any], message: str
) -> None:
    rows: list[Any] = sentences() if options is WORDS else texts()
    rows[4] = {**rows[4], **change}
    with pytest.raises(JobError) as raised:
        shards(tmp_path, rows, options, tokenizer)
    assert str(raised.value).startswith(f"{tmp_path / 'rows.jsonl'}:5: {message}")


def test_a_missing_column_is_named() -> None:
    with pytest.raises(RowError, match="no column 'tags'; the row has 'tokens'"):
        read_word_labels({"tokens": ["Ann"]}, "tokens", "tags")


def test_labels_of_words_need_to_know_the_characters_of_tokens(tmp_path: Path, tokenizer: Any) -> None:
    class SlowTokenizer:
        is_fast = False
        eos_token_id = None
        chat_template = None

    with pytest.raises(JobError, match="labels of words need a fast tokenizer"):
        prepare([tmp_path], tmp_path / "shards", PrepareOptions(WORDS), SlowTokenizer())  # type: ignore[arg-type]


def test_a_batch_has_a_mask_and_the_labels(tmp_path: Path, tokenizer: Any) -> None:
    rows = shards(tmp_path / "texts", texts(4), TEXT, tokenizer)
    batch = collate(rows, "causal", tokenizer.pad_token_id, pad_to_multiple_of=16)
    assert batch.labels.tolist() == [[row["text_label"]] for row in rows]
    assert batch.attention_mask is not None
    assert batch.attention_mask.sum(1).tolist() == [len(row["input_ids"]) for row in rows]
    assert (batch.loss_tokens, batch.tokens) == (4, sum(len(row["input_ids"]) for row in rows))
    assert batch.row_hashes() == [row_hash(number, row) for number, row in enumerate(rows)]
    other = [{**row, "text_label": 1 - row["text_label"] % 2} for row in rows]
    assert all(row_hash(0, one) != row_hash(0, two) for one, two in zip(rows, other, strict=True))

    rows = shards(tmp_path / "words", sentences(4), WORDS, tokenizer)
    batch = collate(rows, "causal", tokenizer.pad_token_id)
    assert batch.labels.shape == batch.input_ids.shape
    assert batch.loss_tokens == sum(int((row["token_labels"] != NO_LOSS).sum()) for row in rows)
    assert batch.row_hashes() == [row_hash(number, row) for number, row in enumerate(rows)]


def test_a_row_is_shown_with_its_label(tmp_path: Path, tokenizer: Any) -> None:
    write_rows(tmp_path / "texts.jsonl", texts(2))
    shown = preview_row([tmp_path / "texts.jsonl"], 2, TEXT, tokenizer)
    assert (shown.labels, shown.trained_tokens) == ((texts(2)[1]["label"],), 0)
    write_rows(tmp_path / "words.jsonl", sentences(2))
    shown = preview_row([tmp_path / "words.jsonl"], 1, WORDS, tokenizer)
    assert list(shown.labels) == sentences(1)[0]["tags"]
    assert shown.trained_tokens == len(shown.labels)


def test_lengths_are_those_of_the_texts(tmp_path: Path, tokenizer: Any) -> None:
    write_rows(tmp_path / "rows.jsonl", texts())
    lengths = measure_lengths([tmp_path / "rows.jsonl"], TEXT, tokenizer)
    assert lengths.input.tokens == sum(len(tokenizer(row["text"])["input_ids"]) for row in texts())
    assert lengths.input.cuts[0].rows == sum(len(tokenizer(row["text"])["input_ids"]) > 12 for row in texts())


def test_the_manifest_has_the_labels_in_their_order(tmp_path: Path, tokenizer: Any) -> None:
    shards(tmp_path, texts(), TEXT, tokenizer)
    options = json.loads((tmp_path / "shards" / "manifest.json").read_text())["options"]["text"]
    assert options["labels"] == list(TOPICS)
    assert options["label"] == "{label}"
    assert "labelEachWord" not in options
