"""Every chat template of the collection against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.chat.messages import message_variants, read_chat
from spotune_trainer.data.chat.renderer import ChatRenderer
from spotune_trainer.data.rows.documents import Document, TokenizedDocument
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from tests.trainer.data.chat.support.conversations import CONVERSATIONS, GOLDEN, conversation_row
from tests.trainer.data.chat.support.reference import REFERENCES, Lost, Refused

OPTIONS = TextOptions("causal", messages="chat", tools="tools", max_length=100_000)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", REFERENCES)
def test_what_is_trained_is_what_the_reference_says(template: str, conversation: str) -> None:
    reference = REFERENCES[template]
    tokenizer = reference.tokenizer
    document = RowRenderer(OPTIONS, tokenizer).render(conversation_row(conversation))
    (tokens,) = DocumentTokenizer(OPTIONS, tokenizer).tokenize([document])
    assert_is_the_rendered_chat(document, tokens, conversation, tokenizer)
    learned: list[list[int]] = [[]]
    for label in tokens.labels.tolist():
        if label != NO_LOSS:
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


def assert_is_the_rendered_chat(
    document: Document, tokens: TokenizedDocument, conversation: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Nothing of the rendered chat is lost, added or in another place: text, token ids and labels.

    No token of these tokenizers is longer than a byte, apart from added ones, so none lies in two segments.
    """
    assert document.chat is not None
    text = "".join(segment.text for segment in document.segments)
    assert text == document.chat.text
    assert text in {"", *renderings(conversation, tokenizer)}
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = tokens.input_ids.tolist()
    assert ids[: len(whole)] == whole
    assert ids[len(whole) :] in ([], [tokenizer.eos_token_id])
    assert np.all((tokens.labels == tokens.input_ids) | (tokens.labels == NO_LOSS))


def renderings(conversation: str, tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """A conversation as the template writes it, in each form of its messages."""
    found = set()
    for messages in message_variants(read_chat(conversation_row(conversation), "chat").messages):
        try:
            tools = conversation_row(conversation)["tools"]
            found.add(str(tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False)))
        except (TemplateError, TypeError, ValueError, KeyError):
            continue
    return found


def test_marks_that_cover_text_of_the_prompt_are_a_warning() -> None:
    warned = {name for name, reference in REFERENCES.items() if ChatRenderer(reference.tokenizer).warnings}
    assert warned == {
        "trl/qwen2_5_training",
        "trl/qwen3_5_nothink_training",
        "trl/qwen3_5_think_training",
        "trl/qwen3_6_training",
        "trl/qwen3_8_training",
        "trl/nemotron_3_nano_training",
        "trl/nemotron_3_super_training",
        "trl/nemotron_3_ultra_training",
        "trl/nemotron_3_5_lightning_training",
        "trl/gptoss_training",
        "trl/muse_glimmer_training",
        "trl/deepseek_r1_distill_training",
        "trl/deepseekv3_training",
    }
    (warning,) = ChatRenderer(REFERENCES["trl/gptoss_training"].tokenizer).warnings
    assert "cover '<|start|>assistant', which the prompt already has" in warning


def test_every_template_is_in_the_reference() -> None:
    names = {str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.jinja")}
    assert names == set(REFERENCES)
