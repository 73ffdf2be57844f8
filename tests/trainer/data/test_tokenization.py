"""From rows to tokens: what carries loss, what ends with the end-of-text token, what is cut."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spotune_trainer.data.tokenization import (
    Document,
    Renderer,
    RowError,
    Template,
    TextOptions,
    TokenisedDocument,
    Tokeniser,
)

END = 1  # </s>


def tokenised(
    options: TextOptions, tokenizer: PreTrainedTokenizerBase, *rows: dict[str, Any]
) -> list[TokenisedDocument]:
    renderer = Renderer(options, tokenizer)
    return list(Tokeniser(options, tokenizer).tokenise([renderer.render(row) for row in rows]))


def rendered(options: TextOptions, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> Document:
    return Renderer(options, tokenizer).render(row)


def learned_text(document: TokenisedDocument, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([token for token in document.labels.tolist() if token != -100]))


def text_of(document: TokenisedDocument, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(document.input_ids.tolist()))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a}: {b c}", "x: 3"),
        ("{{{a}}}", "{x}"),
        ("plain", "plain"),
        ("{flag} {ratio}", "true 0.5"),
    ],
)
def test_templates_fill_in_columns(template: str, text: str) -> None:
    assert Template(template).render({"a": "x", "b c": 3, "flag": True, "ratio": 0.5}) == text


@pytest.mark.parametrize("template", ["{a", "a}", "{a}}", "{}"])
def test_a_lone_brace_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="lone"):
        Template(template)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"b": 1}, "no column 'a'; the row has 'b'"),
        ({"a": None}, "null"),
        ({"a": ["x"]}, "a list"),
        ({"a": b"x"}, "bytes"),
    ],
)
def test_a_column_that_is_no_text_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        Template("{a}").render(row)


def test_a_causal_row_learns_the_completion_and_when_to_stop(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenised(TextOptions("causal", "Q: {q} A:", " {a}"), tokenizer, {"q": "how many", "a": "select"})
    assert text_of(row, tokenizer) == "Q: how many A: select</s>"
    assert learned_text(row, tokenizer) == " select</s>"
    assert len(row.labels) == len(row.input_ids)
    assert not row.truncated


def test_plain_text_is_learned_as_a_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in ("body", "{body}"):
        (row,) = tokenised(TextOptions("causal", text=text), tokenizer, {"body": "how many singers"})
        assert learned_text(row, tokenizer) == text_of(row, tokenizer) == "how many singers</s>"


def test_a_seq2seq_row_keeps_input_and_target_apart(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenised(TextOptions("seq2seq", "{q}", "{a}"), tokenizer, {"q": "how many", "a": "select"})
    assert text_of(row, tokenizer) == "how many"
    assert learned_text(row, tokenizer) == "select</s>"


def ending_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """One that ends every text with </s> by itself, as T5's does."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


def test_a_tokenizer_that_ends_texts_itself_ends_them_once(tokenizer: PreTrainedTokenizerBase) -> None:
    ending = ending_tokenizer(tokenizer)
    row = {"q": "how many", "a": "select"}
    (seq2seq,) = tokenised(TextOptions("seq2seq", "{q}", "{a}"), ending, row)
    assert (text_of(seq2seq, ending), learned_text(seq2seq, ending)) == ("how many</s>", "select</s>")
    (causal,) = tokenised(TextOptions("causal", "{q}", "{a}"), ending, row)
    assert (text_of(causal, ending), learned_text(causal, ending)) == ("how manyselect</s>", "select</s>")


def test_what_is_too_long_is_cut_and_told(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"q": "zz zz zz zz", "a": "yyyyyyyy"}
    (causal,) = tokenised(TextOptions("causal", "{q}", "{a}", max_length=15), tokenizer, row)
    assert causal.truncated
    assert len(causal.input_ids) == len(causal.labels) == 15
    assert causal.input_ids[-1] != END  # the answer goes on
    ending = ending_tokenizer(tokenizer)
    options = TextOptions("seq2seq", "{q}", "{a}", max_length=5, max_completion_length=3)
    (seq2seq,) = tokenised(options, ending, row)
    assert seq2seq.truncated
    assert (len(seq2seq.input_ids), seq2seq.input_ids[-1], len(seq2seq.labels)) == (5, END, 3)
    assert seq2seq.full_length == 12


CHAT = [
    {"role": "user", "content": "how many"},
    {"role": "assistant", "content": "ten"},
    {"role": "user", "content": "select"},
    {"role": "assistant", "content": "count"},
]


def test_every_answer_of_a_chat_is_learned_and_nothing_else(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenised(TextOptions("causal", messages="chat"), tokenizer, {"chat": CHAT})
    assert text_of(row, tokenizer) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert learned_text(row, tokenizer) == "ten</s>count</s>"
    assert rendered(TextOptions("causal", messages="chat"), tokenizer, {"chat": CHAT}).completion == "count"


def test_a_seq2seq_chat_learns_the_last_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenised(TextOptions("seq2seq", messages="chat"), tokenizer, {"chat": CHAT})
    assert text_of(row, tokenizer).endswith("<|user|>select</s><|assistant|>")
    assert learned_text(row, tokenizer) == "count</s>"


def test_a_template_that_rewrites_earlier_answers_learns_the_last(tokenizer: PreTrainedTokenizerBase) -> None:
    forgetful = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="</s>",
        chat_template=(
            "{% for message in messages %}<|{{ message.role }}|>"
            "{% if message.role == 'user' or loop.last %}{{ message.content }}{% endif %}</s>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )
    (row,) = tokenised(TextOptions("causal", messages="chat"), forgetful, {"chat": CHAT})
    assert learned_text(row, forgetful) == "count</s>"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (CHAT[:1], "no message of the role 'assistant'"),
        ("how many", "no JSON list"),
        ([], "no list of messages"),
        ([{"role": "user"}], "lacks text in 'role' or 'content'"),
    ],
)
def test_a_chat_that_cannot_be_learned_is_refused(tokenizer: PreTrainedTokenizerBase, chat: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        rendered(TextOptions("causal", messages="chat"), tokenizer, {"chat": chat})


def test_a_tokenizer_without_a_chat_template_is_told(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RowError, match="chat template"):
        rendered(TextOptions("causal", messages="chat"), ending_tokenizer(tokenizer), {"chat": CHAT})


def test_text_that_utf8_cannot_hold_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RowError, match="UTF-8"):
        rendered(TextOptions("causal", text="body"), tokenizer, {"body": "half a pair \ud800"})


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
def test_options_that_contradict_one_another_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextOptions(**options)
