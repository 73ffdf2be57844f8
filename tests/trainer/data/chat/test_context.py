"""What a model would learn without its context is refused: answers before it that the template leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from tests.trainer.data.chat.support.conversations import CONVERSATIONS, assistant, user
from tests.trainer.data.chat.support.own_templates import render, tokenizer_of, tokenizer_with_template, trained

MULTI = CONVERSATIONS["multi"]
FORGETS = tokenizer_with_template(
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that renders only the last answer."""
LOST = "the chat template of own does not render the content of message 2 (assistant)"


@pytest.mark.parametrize(
    ("flags", "options", "outcomes"),
    [
        ({}, {}, {1: "notRendered", 3: "notRendered", 5: "notRendered"}),
        ({}, {"train_on": "all"}, {1: "notRendered", 3: "notRendered", 5: "notRendered"}),
        ({}, {"train_on": "last"}, {1: "earlier", 3: "earlier", 5: "notRendered"}),
        ({"train": False}, {}, {1: "flagged", 3: "flagged", 5: "notRendered"}),
        ({"train": False}, {"train_on": "all"}, {1: "flagged", 3: "flagged", 5: "notRendered"}),
    ],
)
def test_an_answer_after_lost_ones_is_not_trained(
    flags: dict[str, Any], options: dict[str, Any], outcomes: dict[int, str]
) -> None:
    messages = [message | flags if index in (1, 3) else message for index, message in enumerate(MULTI)]
    chat = render(FORGETS, messages, **options)
    assert chat.outcomes == outcomes
    assert set(chat.problems) == {LOST}
    assert trained(chat) == []


def test_a_pair_whose_chats_lose_an_answer_is_left_out() -> None:
    renderer = RowRenderer(TextOptions("causal", chosen="{chosen}", rejected="{rejected}"), FORGETS)
    document = renderer.render({"chosen": MULTI, "rejected": [*MULTI[:-1], assistant("No.")]})
    assert document.chat is not None
    assert document.chat.problems == (f"chosen: {LOST}",)
    assert not any(segment.has_loss for segment in document.segments)


def test_content_that_is_cut_is_noticed_in_every_turn_of_all_text() -> None:
    cutting = tokenizer_with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('|')[-1] }}<|im_end|>\n{% endfor %}"
    )
    chat = render(cutting, [user("1?"), assistant("A|B"), user("2?"), assistant("C")], train_on="all")
    assert chat.outcomes == {1: "notRendered", 3: "notRendered"}
    assert chat.problems == ("the chat template of own does not render the whole content of message 2",)


@pytest.mark.parametrize("fields", [{"reasoning_content": "x"}, {"content": "<think>\nx\n</think>\n\nA"}])
@pytest.mark.parametrize("options", [{}, {"train_on": "all"}, {"train_on": "last"}])
def test_earlier_reasoning_is_no_context(fields: dict[str, str], options: dict[str, Any]) -> None:
    messages = [user("1?"), assistant("A") | fields, user("2?"), assistant("B", reasoning_content="y")]
    chat = render(tokenizer_of("trl/qwen3"), messages, **options)
    assert chat.problems == ()
    assert chat.outcomes[3] == "trained"
