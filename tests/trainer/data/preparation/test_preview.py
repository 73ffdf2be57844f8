"""A raw row as the model will see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError, UsageError
from spotune_trainer.data.preparation.preview import Span, preview_row
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from tests.trainer.data.chat.support.conversations import CONVERSATIONS, TOOLS, conversation_row, tokenizer_with
from tests.trainer.data.chat.support.reference import REFERENCES

CHATS = TextOptions("causal", messages="chat", tools="tools", max_length=2000)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n\n".join(json.dumps(conversation_row(name)) for name in CONVERSATIONS))
    return path


@pytest.mark.parametrize("template", ["trl/qwen3", "trl/gptoss", "trl/llama3_1", "llama.cpp/MiniMax-M2"])
def test_the_spans_together_are_the_rendered_chat(template: str, chats: Path) -> None:
    tokenizer = tokenizer_with(template, REFERENCES[template].special, REFERENCES[template].eos)
    for number, (name, messages) in enumerate(CONVERSATIONS.items(), start=1):
        preview = preview_row([chats], number, CHATS, tokenizer)
        assert preview.location == f"{chats}:{2 * number - 1}"
        tools: Any = TOOLS if name == "tools" else None
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
        assert "".join(span.text for span in preview.spans) == text
        trained = tuple(span.text for span in preview.spans if span.trained)
        expected = REFERENCES[template].expected(name)
        if isinstance(expected, tuple):
            assert trained == expected
            assert set(preview.turns.values()) == {"trained"}
        else:
            assert preview.problems


def test_a_preview_has_the_tokens_and_labels_of_the_shards(chats: Path) -> None:
    tokenizer = tokenizer_with("trl/qwen3", "<|im_start|>", "<|im_end|>")
    options = TextOptions("causal", messages="chat", tools="tools", max_length=60)
    preview = preview_row([chats], 2, options, tokenizer)
    document = RowRenderer(options, tokenizer).render(conversation_row("multi"))
    (tokens,) = DocumentTokenizer(options, tokenizer).tokenize([document])
    assert preview.tokens == len(tokens.input_ids) == 60
    assert preview.trained_tokens == int((tokens.labels != -100).sum())
    assert preview.cut_tokens == tokens.full_length - 60
    assert sum(span.tokens for span in preview.spans) == 60


def test_a_preview_says_why_a_row_is_left_out(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"q": "zz" * 40, "a": "ten"}))
    preview = preview_row([path], 1, TextOptions("causal", "{q}", "{a}", max_length=8), tokenizer)
    assert preview.problems == ("nothing to learn is left within dataset.maxLength (8 of 84 tokens)",)


def test_a_seq2seq_row_is_its_input_and_its_target(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a\nhow many,select\n")
    preview = preview_row([tmp_path / "a.csv"], 1, TextOptions("seq2seq", "{q}", "{a}"), tokenizer)
    assert [(span.text, span.trained) for span in preview.spans] == [("how many", False), ("select</s>", True)]
    assert preview.turns == {}


def test_rows_are_counted_over_all_files(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    options = TextOptions("causal", text="body")
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": f"{name} 1"}) + "\n" + json.dumps({"body": name}))
    preview = preview_row([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], 3, options, tokenizer)
    assert preview.location == f"{tmp_path}/b.jsonl:1"
    assert preview.spans == (Span("b 1</s>", 4, True),)
    with pytest.raises(UsageError, match="there is no row 5: the input has 4 rows"):
        preview_row([tmp_path], 5, options, tokenizer)


def test_a_wrong_row_is_named_by_its_line(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": None}))
    with pytest.raises(JobError, match=r"a\.jsonl:1: column 'body' is null"):
        preview_row([tmp_path / "a.jsonl"], 1, TextOptions("causal", text="body"), tokenizer)
