"""Rows to tokens: which tokens carry loss, where the end-of-text token is added, what is truncated."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spotune.prompting.template import RowError
from spotune_trainer.data.tokenization import (
    Document,
    DocumentTokenizer,
    RowRenderer,
    TextOptions,
    TokenizedDocument,
)

EOS = 1  # </s>


def tokenize(
    options: TextOptions, tokenizer: PreTrainedTokenizerBase, *rows: dict[str, Any]
) -> list[TokenizedDocument]:
    renderer = RowRenderer(options, tokenizer)
    return list(DocumentTokenizer(options, tokenizer).tokenize([renderer.render(row) for row in rows]))


def render(options: TextOptions, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> Document:
    return RowRenderer(options, tokenizer).render(row)


def text_with_loss(document: TokenizedDocument, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([token for token in document.labels.tolist() if token != -100]))


def text_of(document: TokenizedDocument, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(document.input_ids.tolist()))


def test_loss_of_a_causal_row_is_on_completion_and_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenize(TextOptions("causal", "Q: {q} A:", " {a}"), tokenizer, {"q": "how many", "a": "select"})
    assert text_of(row, tokenizer) == "Q: how many A: select</s>"
    assert text_with_loss(row, tokenizer) == " select</s>"
    assert len(row.labels) == len(row.input_ids)
    assert not row.truncated


def test_all_of_a_plain_text_carries_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in ("body", "{body}"):
        (row,) = tokenize(TextOptions("causal", text=text), tokenizer, {"body": "how many singers"})
        assert text_with_loss(row, tokenizer) == text_of(row, tokenizer) == "how many singers</s>"


def test_a_seq2seq_row_has_input_and_target(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenize(TextOptions("seq2seq", "{q}", "{a}"), tokenizer, {"q": "how many", "a": "select"})
    assert text_of(row, tokenizer) == "how many"
    assert text_with_loss(row, tokenizer) == "select</s>"


def tokenizer_that_adds_eos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer that appends </s> to every text, as T5's does."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


def test_eos_is_not_doubled_when_the_tokenizer_adds_it(tokenizer: PreTrainedTokenizerBase) -> None:
    adds_eos = tokenizer_that_adds_eos(tokenizer)
    row = {"q": "how many", "a": "select"}
    (seq2seq,) = tokenize(TextOptions("seq2seq", "{q}", "{a}"), adds_eos, row)
    assert (text_of(seq2seq, adds_eos), text_with_loss(seq2seq, adds_eos)) == ("how many</s>", "select</s>")
    (causal,) = tokenize(TextOptions("causal", "{q}", "{a}"), adds_eos, row)
    assert (text_of(causal, adds_eos), text_with_loss(causal, adds_eos)) == ("how manyselect</s>", "select</s>")


def test_long_rows_are_truncated_and_reported_as_truncated(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"q": "zz zz zz zz", "a": "yyyyyyyy"}
    (causal,) = tokenize(TextOptions("causal", "{q}", "{a}", max_length=15), tokenizer, row)
    assert causal.truncated
    assert len(causal.input_ids) == len(causal.labels) == 15
    assert causal.input_ids[-1] != EOS  # the answer was truncated, so it has no EOS
    adds_eos = tokenizer_that_adds_eos(tokenizer)
    options = TextOptions("seq2seq", "{q}", "{a}", max_length=5, max_completion_length=3)
    (seq2seq,) = tokenize(options, adds_eos, row)
    assert seq2seq.truncated
    assert (len(seq2seq.input_ids), seq2seq.input_ids[-1], len(seq2seq.labels)) == (5, EOS, 3)
    assert seq2seq.full_length == 12


CHAT = [
    {"role": "user", "content": "how many"},
    {"role": "assistant", "content": "ten"},
    {"role": "user", "content": "select"},
    {"role": "assistant", "content": "count"},
]


def test_loss_of_a_chat_is_on_every_assistant_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenize(TextOptions("causal", messages="chat"), tokenizer, {"chat": CHAT})
    assert text_of(row, tokenizer) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text_with_loss(row, tokenizer) == "ten</s>count</s>"
    assert render(TextOptions("causal", messages="chat"), tokenizer, {"chat": CHAT}).completion == "count"


def test_target_of_a_seq2seq_chat_is_the_last_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenize(TextOptions("seq2seq", messages="chat"), tokenizer, {"chat": CHAT})
    assert text_of(row, tokenizer).endswith("<|user|>select</s><|assistant|>")
    assert text_with_loss(row, tokenizer) == "count</s>"


def test_a_chat_template_that_drops_earlier_answers_leaves_loss_on_the_last(tokenizer: PreTrainedTokenizerBase) -> None:
    dropping = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="</s>",
        chat_template=(
            "{% for message in messages %}<|{{ message.role }}|>"
            "{% if message.role == 'user' or loop.last %}{{ message.content }}{% endif %}</s>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )
    (row,) = tokenize(TextOptions("causal", messages="chat"), dropping, {"chat": CHAT})
    assert text_with_loss(row, dropping) == "count</s>"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (CHAT[:1], "no message of the role 'assistant'"),
        ("how many", "not a JSON list"),
        ([], "not a list of messages"),
        ([{"role": "user"}], "lacks text in 'role' or 'content'"),
    ],
)
def test_a_chat_without_usable_messages_is_rejected(
    tokenizer: PreTrainedTokenizerBase, chat: Any, message: str
) -> None:
    with pytest.raises(RowError, match=message):
        render(TextOptions("causal", messages="chat"), tokenizer, {"chat": chat})


def test_a_tokenizer_without_a_chat_template_is_rejected(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RowError, match="chat template"):
        render(TextOptions("causal", messages="chat"), tokenizer_that_adds_eos(tokenizer), {"chat": CHAT})


def test_text_with_a_lone_surrogate_is_rejected(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RowError, match="UTF-8"):
        render(TextOptions("causal", text="body"), tokenizer, {"body": "lone surrogate \ud800"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "causal"}, "exactly one"),
        ({"task": "causal", "text": "a", "messages": "b"}, "exactly one"),
        ({"task": "seq2seq", "text": "a"}, "plain text is for causal"),
        ({"task": "causal", "text": "a", "keep": ("labels",)}, "cannot be called 'labels'"),
        ({"task": "seq2seq", "prompt": "a", "completion": "b", "packing": True}, "packing is for causal"),
        ({"task": "causal", "text": "a", "packing": True, "keep": ("x",)}, "cannot keep columns"),
    ],
)
def test_contradicting_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextOptions(**options)
