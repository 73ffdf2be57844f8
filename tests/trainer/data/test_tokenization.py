"""Rows to tokens: which tokens carry loss, where the end-of-text token is added, what is truncated."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spotune.prompting.template import RowError
from spotune_trainer.data.rows.documents import Document, TokenizedDocument
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from tests.trainer.data.conftest import CHAT_TEMPLATE

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


def with_template(tokenizer: PreTrainedTokenizerBase, template: str, **options: Any) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=template, **{"eos_token": "</s>"} | options
    )


def test_a_chat_template_that_drops_earlier_answers_leaves_no_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    dropping = with_template(
        tokenizer,
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.role == 'user' or loop.last %}{{ message.content }}{% endif %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )
    options = TextOptions("causal", messages="chat")
    (row,) = tokenize(options, dropping, {"chat": CHAT})
    assert text_with_loss(row, dropping) == ""
    chat = render(options, dropping, {"chat": CHAT}).chat
    assert chat is not None
    assert chat.outcomes == {1: "notRendered", 3: "notRendered"}
    assert "does not render the content of message 2" in chat.problems[0]


def test_whitespace_after_a_turn_carries_no_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    lines = with_template(tokenizer, CHAT_TEMPLATE.replace("</s>{% endfor %}", "</s>\n{% endfor %}"))
    (row,) = tokenize(TextOptions("causal", messages="chat"), lines, {"chat": CHAT})
    assert text_of(row, lines).endswith("count</s>\n")
    assert text_with_loss(row, lines) == "ten</s>count</s>"
    (row,) = tokenize(TextOptions("causal", messages="chat", train_trailing_whitespace=True), lines, {"chat": CHAT})
    assert text_with_loss(row, lines) == "ten</s>\ncount</s>\n"


def test_a_last_turn_that_ends_with_another_token_goes_on_to_the_end_of_text(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Base models stop only at the end-of-text token. Whitespace before it is the template's."""
    ends_with_user = with_template(tokenizer, CHAT_TEMPLATE.replace("</s>{% endfor %}", "<|user|>\n{% endfor %}"))
    (row,) = tokenize(TextOptions("causal", messages="chat"), ends_with_user, {"chat": CHAT})
    assert text_of(row, ends_with_user).endswith("count<|user|>\n</s>")
    assert text_with_loss(row, ends_with_user) == "ten<|user|>count<|user|></s>"


def test_the_reference_answer_is_that_of_the_last_trained_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    """Evaluation generates what follows the tokens before the last label."""
    chat = [*CHAT[:3], CHAT[3] | {"train": False}]
    assert render(TextOptions("causal", messages="chat"), tokenizer, {"chat": chat}).completion == "ten"
    none = [CHAT[0], CHAT[1] | {"train": False}]
    document = render(TextOptions("causal", messages="chat"), tokenizer, {"chat": none})
    assert document.completion == ""
    assert not any(segment.has_loss for segment in document.segments)


def metaspace_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer that writes spaces as `_` and, like SentencePiece, puts one before every text."""
    words = {f"{space}{word}" for space in ("", "_") for word in ("Q", "how", "many", "ten", "A", "_")}
    special = {"<pad>": 0, "</s>": 1, "<|user|>": 2, "<|assistant|>": 3, "?": 4}
    backend = Tokenizer(WordLevel(special | {word: 5 + number for number, word in enumerate(sorted(words))}, "?"))
    backend.pre_tokenizer = Metaspace("_", prepend_scheme="always", split=True)
    backend.add_special_tokens(list(special)[:4])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="?")


def test_a_chat_has_the_tokens_of_its_whole_text() -> None:
    spaces = metaspace_tokenizer()
    spaces.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }} A{% else %} {{ m.content }}</s>{% endif %}"
        "{% endfor %}"
    )
    (row,) = tokenize(TextOptions("causal", messages="chat"), spaces, {"chat": [
        {"role": "user", "content": "how many"}, {"role": "assistant", "content": "ten"},
        {"role": "user", "content": "how"}, {"role": "assistant", "content": "many"},
    ]})  # fmt: skip
    whole = spaces("Q how many A ten</s>Q how A many</s>", add_special_tokens=False)["input_ids"]
    assert row.input_ids.tolist() == whole
    learned = spaces.convert_ids_to_tokens([token for token in row.labels.tolist() if token != -100])
    assert learned == ["_ten", "</s>", "_many", "</s>"]


def test_a_token_in_two_segments_is_divided(tokenizer: PreTrainedTokenizerBase) -> None:
    # The vocabulary has "singer" as one token; the prompt ends within it, as it does at inference.
    within = with_template(
        tokenizer,
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}sin{% else %}{{ m.content }}</s>{% endif %}"
        "{% endfor %}",
    )
    chat = [{"role": "user", "content": "count "}, {"role": "assistant", "content": "ger"}]
    (row,) = tokenize(TextOptions("causal", messages="chat"), within, {"chat": chat})
    assert within("count singer</s>")["input_ids"] != row.input_ids.tolist()
    assert text_of(row, within) == "count singer</s>"
    assert text_with_loss(row, within) == "ger</s>"


def test_turns_beyond_the_maximum_length_are_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    (whole,) = tokenize(TextOptions("causal", messages="chat"), tokenizer, {"chat": CHAT})
    first = int((whole.labels != -100).argmax())
    for length, cut in ((first, 2), (first + 1, 1), (len(whole.input_ids), 0)):
        (row,) = tokenize(TextOptions("causal", messages="chat", max_length=length), tokenizer, {"chat": CHAT})
        assert row.cut_turns == cut


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (CHAT[:1], "no message of the role 'assistant'"),
        ("how many", "not a JSON list"),
        ([], "an empty list of messages"),
        ([{"role": "user"}], "lacks text in 'role' or 'content'"),
    ],
)
def test_a_chat_without_usable_messages_is_rejected(
    tokenizer: PreTrainedTokenizerBase, chat: Any, message: str
) -> None:
    with pytest.raises(RowError, match=message):
        render(TextOptions("causal", messages="chat"), tokenizer, {"chat": chat})


def test_a_tokenizer_without_a_chat_template_is_rejected(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="need a tokenizer with a chat template"):
        RowRenderer(TextOptions("causal", messages="chat"), tokenizer_that_adds_eos(tokenizer))


def test_text_with_a_lone_surrogate_is_rejected(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RowError, match="UTF-8"):
        render(TextOptions("causal", text="body"), tokenizer, {"body": "lone surrogate \ud800"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "causal"}, "exactly one"),
        ({"task": "causal", "text": "a", "messages": "b"}, "exactly one"),
        ({"task": "seq2seq", "text": "a"}, "plain text is for causal"),
        ({"task": "seq2seq", "messages": "a"}, "chats are for causal models"),
        ({"task": "causal", "text": "a", "train_on": "last"}, "are for chats"),
        ({"task": "causal", "text": "a", "keep": ("labels",)}, "cannot be called 'labels'"),
        ({"task": "seq2seq", "prompt": "a", "completion": "b", "packing": True}, "packing is for causal"),
        ({"task": "causal", "text": "a", "packing": True, "keep": ("x",)}, "cannot keep columns"),
        ({"task": "causal", "query": "a", "positive": "b", "packing": True}, "texts with embeddings cannot be packed"),
        (
            {"task": "causal", "prompt": "a", "completion": "b", "label": "{c}", "packing": True},
            "answers with a label cannot be packed",
        ),
        ({"task": "seq2seq", "prompt": "a", "chosen": "b", "rejected": "c"}, "are not for seq2seq models"),
    ],
)
def test_contradicting_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextOptions(**options)
