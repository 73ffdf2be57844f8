"""Every chat template of the collection against the reference."""

from __future__ import annotations

import pytest

from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from tests.trainer.data.chat.support.conversations import CONVERSATIONS, GOLDEN, conversation_row, tokenizer_with
from tests.trainer.data.chat.support.reference import REFERENCES, Lost, Refused

OPTIONS = TextOptions("causal", messages="chat", tools="tools", max_length=100_000)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", REFERENCES)
def test_what_is_trained_is_what_the_reference_says(template: str, conversation: str) -> None:
    reference = REFERENCES[template]
    tokenizer = tokenizer_with(template, reference.special, reference.eos)
    document = RowRenderer(OPTIONS, tokenizer).render(conversation_row(conversation))
    (tokens,) = DocumentTokenizer(OPTIONS, tokenizer).tokenize([document])
    learned: list[list[int]] = [[]]
    for label in tokens.labels.tolist():
        if label != -100:
            learned[-1].append(label)
        elif learned[-1]:
            learned.append([])
    texts = tuple(str(tokenizer.decode(ids)) for ids in learned if ids)
    expected = reference.expected(conversation)
    assert document.chat is not None
    if isinstance(expected, tuple):
        assert texts == expected
        assert document.chat.problems == ()
    elif isinstance(expected, Lost):
        assert texts == expected.remaining
        assert all(template in problem for problem in document.chat.problems)
        assert expected.reason in document.chat.problems[0]
    else:
        assert isinstance(expected, Refused)
        assert expected.error in document.chat.problems[0]
        assert texts == ()


def test_every_template_is_in_the_reference() -> None:
    names = {str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.jinja")}
    assert names == set(REFERENCES)
