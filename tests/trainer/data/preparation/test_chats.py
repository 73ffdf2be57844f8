"""Shards of chats: what is counted, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.rows.options import TextOptions
from tests.trainer.data.preparation.test_prepare import Rows, read, write_jsonl

pytestmark = pytest.mark.slow

TURN = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "ten"}]
CHATS = PrepareOptions(TextOptions("causal", messages="chat", max_length=64), processes=1)


def refusing(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer whose chat template refuses the word "age" and leaves out the word "name"."""
    changed = type(tokenizer).__new__(type(tokenizer))
    changed.__dict__.update(tokenizer.__dict__)
    changed.chat_template = str(tokenizer.chat_template).replace(
        "{{ message.content }}",
        "{% if message.content == 'age' %}{{ raise_exception('no age') }}{% endif %}"
        "{% if message.content != 'name' %}{{ message.content }}{% endif %}",
    )
    changed.name_or_path = "acme/refusing"
    return changed


def answer(text: str, **flags: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **flags}


def test_the_report_counts_turns_and_tokens_by_outcome(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows: Rows = [
        {"chat": [*TURN, TURN[0], answer("select", train=False)]},
        {"chat": [*TURN, {"role": "user", "content": "zz" * 40}, answer("select")]},
        {"chat": [{"role": "user", "content": "zz" * 40}, answer("select")]},
    ]
    options = dataclasses.replace(CHATS, max_skipped=1)
    prepared = prepare([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", options, tokenizer)
    counts = prepared.manifest["splits"]["train"]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]["train"] == counts
    assert counts["turns"] == {"cut": 2, "flagged": 1, "trained": 2}
    assert (counts["documents"], counts["samples"], counts["dropped"], counts["truncated"]) == (3, 2, 1, 2)
    samples = read(tmp_path / "out", tmp_path)
    assert counts["tokens"] == sum(len(sample["input_ids"]) for sample in samples)
    assert counts["lossTokens"] == sum(int((sample["labels"] != -100).sum()) for sample in samples)
    texts = [str(tokenizer.apply_chat_template(row["chat"], tokenize=False)) for row in rows]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert counts["tokens"] + counts["cutTokens"] + counts["droppedTokens"] == sum(lengths)
    assert counts["droppedTokens"] == 64
    assert counts["leftOut"] == {"cut": {"rows": 1, "tokens": 64}}
    assert counts["turnTokens"] == {"flagged": len(tokenizer("select", add_special_tokens=False)["input_ids"])}
    ends = len(tokenizer("select</s>", add_special_tokens=False)["input_ids"])
    assert counts["cutLossTokens"] == 2 * ends
    assert [problem.partition(" is left")[0] for problem in counts["problems"]] == [f"{path}:3: nothing to learn"]


def test_tokens_of_earlier_turns_are_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"chat": [*TURN, TURN[0], answer("select")]}])
    options = dataclasses.replace(CHATS, text=dataclasses.replace(CHATS.text, train_on="last"))
    counts = prepare([path], tmp_path / "out", options, tokenizer).manifest["splits"]["train"]
    assert counts["turns"] == {"earlier": 1, "trained": 1}
    assert counts["turnTokens"] == {"earlier": len(tokenizer("ten", add_special_tokens=False)["input_ids"])}


def test_a_chat_without_a_message_to_learn_is_refused_with_the_fix(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"chat": TURN}, {"chat": [TURN[0], answer("ten", train=False)]}])
    with pytest.raises(
        JobError, match=r"a\.jsonl:2: no message is left to learn.*Remove the row, or the mark"
    ) as refused:
        prepare([path], tmp_path / "out", CHATS, tokenizer)
    assert "maxLength" not in str(refused.value)
    counts = prepare([path], tmp_path / "out", dataclasses.replace(CHATS, max_skipped=1), tokenizer).manifest["splits"]
    assert counts["train"]["leftOut"]["flagged"]["rows"] == 1


def test_an_empty_answer_within_a_chat_is_refused_or_left_out(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"chat": [TURN[0], answer(" "), *TURN]}])
    with pytest.raises(JobError, match=r"a\.jsonl:1: message 2 is an empty answer.*Remove or correct what is empty"):
        prepare([path], tmp_path / "out", CHATS, tokenizer)
    prepared = prepare([path], tmp_path / "out", dataclasses.replace(CHATS, max_skipped=1), tokenizer)
    assert prepared.manifest["splits"]["train"]["turns"] == {"empty": 1, "trained": 1}
    (row,) = read(tmp_path / "out", tmp_path)
    assert str(tokenizer.decode([token for token in row["labels"].tolist() if token != -100])) == "ten</s>"


def test_chats_of_sharegpt_are_read_as_they_are(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[message["role"]], "value": message["content"]} for message in TURN]
    for name, chat in (("a", TURN), ("b", sharegpt)):
        prepare([write_jsonl(tmp_path / f"{name}.jsonl", [{"chat": chat}])], tmp_path / name, CHATS, tokenizer)
    assert (tmp_path / "a/shard.00000.mds").read_bytes() == (tmp_path / "b/shard.00000.mds").read_bytes()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name", "does not render the content of message 2 (assistant)"),
        ("age", "cannot render the messages: no age"),
    ],
)
def test_turns_that_the_template_loses_are_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, text: str, reason: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"chat": TURN}, {"chat": [TURN[0], answer(text)]}])
    with pytest.raises(JobError) as raised:
        prepare([path], tmp_path / "out", CHATS, refusing(tokenizer))
    assert str(raised.value).startswith(f"{path}:2: the chat template of acme/refusing {reason}. Correct the data")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_turns_are_left_out_up_to_max_skipped(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows: Rows = [{"chat": TURN}, {"chat": [*TURN, TURN[0], answer("name")]}, {"chat": [TURN[0], answer("age")]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows * 20)
    options = dataclasses.replace(CHATS, max_skipped=40, part_size=500)
    prepared = prepare([path], tmp_path / "out", options, refusing(tokenizer))
    counts = prepared.manifest["splits"]["train"]
    assert counts["turns"] == {"notRendered": 20, "refused": 20, "trained": 40}
    assert (counts["documents"], counts["samples"], counts["dropped"]) == (60, 40, 20)
    assert len(counts["problems"]) == 5
    assert counts["problems"][0].startswith(f"{path}:2: the chat template of acme/refusing does not render")
    message = r"40 assistant turns cannot be trained on \(dataset.maxSkipped: 39\): .*a.jsonl:2: .*; .*a.jsonl:3: "
    for output in ("out", "other"):  # also if the dataset exists, made with a higher limit
        with pytest.raises(JobError, match=message):
            prepare([path], tmp_path / output, dataclasses.replace(options, max_skipped=39), refusing(tokenizer))
    assert prepare([path], tmp_path / "out", options, refusing(tokenizer)).reused
