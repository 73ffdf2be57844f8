"""What of a chat is trained on: by turn, flag and option, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from spotune.prompting.content import render_content
from spotune.prompting.template import RowError
from tests.trainer.data.chat.support.conversations import CONVERSATIONS, TOOLS, assistant, conversation_row, user
from tests.trainer.data.chat.support.own_templates import render, tokenizer_of, tokenizer_with_template, trained
from tests.trainer.data.chat.support.reference import REFERENCES

MULTI = CONVERSATIONS["multi"]
NEXT_ROLE = "<|observation|>"
"""How GLM's calls end. It is the next message's, except in TRL's template."""
UNSTABLE = ["trl/qwen3", "trl/gptoss", "trl/phi3_5", "trl/glm4moe", "trl/deepseekv3", "trl/nemotron_3_nano"]
"""Templates that render a message differently once others follow, or write nothing at the end of a turn."""


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", REFERENCES)
def test_a_changed_answer_changes_the_text_only_within_its_span(template: str, conversation: str) -> None:
    """An independent check of the spans: each answer is replaced by another, and the rest of the chat stays."""
    tokenizer = tokenizer_of(template)
    row = conversation_row(conversation)
    chat = render(tokenizer, row["chat"], tools=row["tools"])
    for turn in {span.turn for span in chat.spans}:
        assert turn is not None
        if not row["chat"][turn]["content"]:
            continue
        changed = [dict(message) for message in row["chat"]]
        changed[turn]["content"] = "Something else."
        other = render(tokenizer, changed, tools=row["tools"])
        span = next(span for span in chat.spans if span.turn == turn)
        assert other.text.startswith(chat.text[: span.start])
        assert other.text.endswith(chat.text[span.end :])
        assert row["chat"][turn]["content"] in chat.text[span.start : span.end]


_TEXT = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Z", "S"]) | st.just("\n"), max_size=20).filter(
    lambda text: text.strip() and not set("<>[]{}") & set(text)
)


@pytest.mark.parametrize("template", [*UNSTABLE, "trl/qwen2_5", "trl/gemma3", "axolotl/mistral_v1", "trl/lfm2_2_5"])
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.tuples(_TEXT, _TEXT, st.sampled_from([None, True, False])), min_size=1, max_size=4))
def test_spans_are_ordered_and_hold_all_answers_and_no_questions(
    template: str, texts: list[tuple[str, str, bool | None]]
) -> None:
    tokenizer = tokenizer_of(template)
    messages = []
    for number, (question, answer, flag) in enumerate(texts):
        messages += [user(f"q{number} {question}"), assistant(f"a{number} {answer}", train=flag)]
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    chat = render(tokenizer, messages)
    assert chat.problems == ()
    assert chat.text == tokenizer.apply_chat_template(plain, tokenize=False)
    bounds = [bound for span in chat.spans for bound in (span.start, span.end)]
    assert bounds == sorted(bounds)
    asked = [index for index, message in enumerate(messages) if message.get("train", 0) in (None, True)]
    assert list(dict.fromkeys(span.turn for span in chat.spans)) == asked
    for span in {span.turn: span for span in reversed(chat.spans)}.values():
        inside = chat.text[span.start : span.end]
        assert span.turn is not None
        assert plain[span.turn]["content"].strip() in inside
        assert not any(f"q{number} " in inside for number in range(len(texts)))


@pytest.mark.parametrize("template", UNSTABLE)
def test_every_turn_is_trained_where_only_the_last_was_before(template: str) -> None:
    chat = render(tokenizer_of(template), MULTI)
    assert set(chat.outcomes.values()) == {"trained"}
    assert {span.turn for span in chat.spans} == {1, 3, 5}


def test_flags_choose_the_turns() -> None:
    messages = [MULTI[0], MULTI[1] | {"train": False}, MULTI[2], MULTI[3] | {"weight": 1}, MULTI[4], MULTI[5]]
    chat = render(tokenizer_of("trl/qwen3"), messages)
    assert trained(chat) == ["Because.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]
    assert chat.outcomes == {1: "flagged", 3: "trained", 5: "trained"}


def test_only_the_last_turn_is_trained_if_asked_for() -> None:
    chat = render(tokenizer_of("trl/gptoss"), MULTI, train_on="last")
    assert trained(chat) == ["<|channel|>final<|message|>Yes.<|return|>"]
    assert chat.outcomes == {1: "earlier", 3: "earlier", 5: "trained"}


def test_all_text_but_flagged_turns_is_trained_if_asked_for() -> None:
    tokenizer = tokenizer_of("trl/qwen2_5")
    assert trained(render(tokenizer, MULTI, train_on="all")) == [render(tokenizer, MULTI).text]
    messages = [*MULTI[:3], MULTI[3] | {"train": False}, *MULTI[4:]]
    chat = render(tokenizer, messages, train_on="all")
    assert chat.outcomes == {1: "trained", 3: "flagged", 5: "trained"}
    before, after = trained(chat)
    assert before.endswith("<|im_start|>assistant\n")
    assert after.startswith("<|im_start|>user\nSure?")
    assert "Because." not in before + after


def test_whitespace_after_a_turn_is_trained_if_asked_for() -> None:
    tokenizer = tokenizer_of("trl/qwen2_5")
    chat = render(tokenizer, MULTI[:4], trailing_whitespace=True)
    assert trained(chat) == ["Ten.<|im_end|>\n", "Because.<|im_end|>\n"]


def test_reasoning_in_the_content_is_kept_or_removed_as_the_template_does() -> None:
    messages = [user("1?"), assistant("<think>\nx\n</think>\n\nA"), user("2?"), assistant("<think>\ny\n</think>\n\nB")]
    chat = render(tokenizer_of("trl/qwen3"), messages)
    assert trained(chat) == ["A<|im_end|>", "<think>\ny\n</think>\n\nB<|im_end|>"]
    assert chat.reasoning_removed == 1
    lost = render(tokenizer_of("trl/deepseek_r1_distill"), messages)
    assert lost.outcomes == {1: "trained", 3: "notRendered"}
    assert lost.problems == (
        "the chat template of trl/deepseek_r1_distill does not render the reasoning in the content of message 4",
    )


@pytest.mark.parametrize("arguments", [{}, {"days": 3}, {"at": {"city": "Paris"}, "days": [1, 2]}, '{"city": "Paris"}'])
@pytest.mark.parametrize("template", ["trl/qwen3", "trl/qwen2_5", "trl/gptoss", "trl/deepseekv3", "trl/glm4moe"])
def test_calls_of_any_arguments_are_trained(template: str, arguments: Any) -> None:
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": arguments}}
    answer = {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "get_weather"}
    messages = [user("Weather?"), assistant(None, tool_calls=[call]), answer, assistant("Sunny."), *MULTI[2:4]]
    chat = render(tokenizer_of(template), messages, tools=TOOLS)
    assert chat.problems == ()
    first, second, _ = trained(chat)
    assert "get_weather" in first
    assert "sunny" not in first + second
    assert "Sunny." in second


def test_the_answer_of_a_turn_without_content_is_its_call() -> None:
    row = conversation_row("tools")
    chat = render(tokenizer_of("trl/qwen2_5"), row["chat"][:2], tools=TOOLS)
    assert chat.answer == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert render(tokenizer_of("trl/qwen2_5"), row["chat"], tools=TOOLS).answer == "Welcome."


@pytest.mark.parametrize(
    "template", [name for name, reference in REFERENCES.items() if isinstance(reference.expected("tools"), tuple)]
)
def test_a_chat_may_end_with_a_call(template: str) -> None:
    expected = REFERENCES[template].expected("tools")
    assert isinstance(expected, tuple)
    chat = render(tokenizer_of(template), CONVERSATIONS["tools"][:2], tools=TOOLS)
    (call,) = trained(chat)
    assert "get_weather" in call
    assert call.removesuffix(NEXT_ROLE)[-12:] == expected[0].removesuffix(NEXT_ROLE)[-12:]


def test_several_calls_in_one_turn_are_trained() -> None:
    calls = [
        {"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}} for city in ("A", "B")
    ]
    answers = [{"role": "tool", "content": "sunny"}, {"role": "tool", "content": "rainy"}]
    messages = [user("Weather?"), assistant("Let me see.", tool_calls=calls), *answers, assistant("Mixed.")]
    first, last = trained(render(tokenizer_of("trl/qwen3"), messages, tools=TOOLS))
    assert first.startswith("Let me see.\n<tool_call>")
    assert first.count("<tool_call>") == 2
    assert last.endswith("Mixed.<|im_end|>")


def test_text_after_the_result_of_a_tool_is_not_mixed_with_it() -> None:
    """Gemma 4 writes the content of a turn with calls after the results, so the turn is in two places."""
    messages = CONVERSATIONS["tools"]
    messages = [messages[0], messages[1] | {"content": "Let me see."}, *messages[2:]]
    chat = render(tokenizer_of("trl/gemma4"), messages, tools=TOOLS)
    assert chat.outcomes[1] == "notPlaced"
    assert "sunny" not in "".join(trained(chat))


def test_tools_that_a_template_ignores_are_a_problem() -> None:
    chat = render(tokenizer_of("axolotl/chatml"), MULTI[:2], tools=TOOLS)
    assert chat.problems == ("the chat template of axolotl/chatml does not render the tool 'get_weather'",)


@pytest.mark.parametrize(
    ("template", "joined"), [("trl/qwen2_5_vl", "ab"), ("trl/gemma3", "ab"), ("axolotl/chatml", "a\nb")]
)
def test_text_parts_are_rendered_as_in_serving(template: str, joined: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [user("1?") | {"content": parts}, assistant("A"), user("2?"), assistant("B") | {"content": parts}]
    tokenizer = tokenizer_of(template)
    chat = render(tokenizer, messages)
    assert trained(chat)[1].startswith(joined)
    assert chat.text.count(joined) == 2
    assert chat.answer == joined
    assert chat.text == render_content(lambda form: apply(tokenizer, form), messages, (TypeError, TemplateError))


def apply(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def test_templates_that_want_lists_of_parts_get_them() -> None:
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content[0]['text'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = render(tokenizer_with_template(template), MULTI[:4])
    assert trained(chat) == ["Ten.<|im_end|>", "Because.<|im_end|>"]


def test_arguments_are_json_where_a_template_writes_them_as_they_are() -> None:
    plain = tokenizer_with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }} {{ call.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = render(plain, CONVERSATIONS["tools"][:2])
    assert trained(chat) == ['get_weather {"city": "Paris"}<|im_end|>']


def test_a_list_that_a_template_writes_as_python_is_lost() -> None:
    """A template that refuses text must not be given parts, which it writes as they are."""
    refusing = tokenizer_with_template(
        "{% for m in messages %}{% if m.content == 'A' %}{{ raise_exception('no A') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    chat = render(refusing, [user("1?"), assistant("A")])
    assert chat.outcomes == {1: "refused"}
    assert chat.problems == ("the chat template of own cannot render the messages: no A",)


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


def test_generation_marks_decide_where_a_template_has_them() -> None:
    # Without marks the role would be trained too: this template has no generation prompt.
    assert trained(render(tokenizer_with_template(MARKED), MULTI)) == [
        "Ten.<|im_end|>",
        "Because.<|im_end|>",
        "Yes.<|im_end|>",
    ]


def test_marks_that_leave_out_the_end_of_a_turn_are_extended_to_it() -> None:
    short = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    chat = render(tokenizer_with_template(short), MULTI[:4])
    assert trained(chat) == ["Ten.<|im_end|>", "Because.<|im_end|>"]


def test_an_answer_outside_the_marks_is_a_problem() -> None:
    partial = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    chat = render(tokenizer_with_template(partial), MULTI[:4])
    assert chat.outcomes == {1: "notPlaced", 3: "trained"}
    assert "message 2 outside its generation marks" in chat.problems[0]


@pytest.mark.parametrize("template", ["trl/qwen3", "trl/gptoss", "trl/llama3", "trl/glm4moe"])
def test_a_chat_may_begin_with_the_assistant(template: str) -> None:
    chat = render(tokenizer_of(template), [assistant("Hello!"), *MULTI[:2]])
    assert chat.problems == ()
    first, last = trained(chat)
    assert "Hello!" in first
    assert "assistant" not in first
    assert "Ten." in last


def test_an_empty_answer_is_not_trained_to_end() -> None:
    messages = [user("1?"), assistant(""), user("2?"), assistant("B")]
    chat = render(tokenizer_of("trl/qwen2_5"), messages)
    assert trained(chat) == ["B<|im_end|>"]
    assert chat.outcomes == {1: "empty", 3: "trained"}
    assert chat.problems == ("message 2 is an empty answer, of which only the end could be learned",)
    earlier = render(tokenizer_of("trl/qwen2_5"), messages, train_on="last")
    assert earlier.outcomes == {1: "earlier", 3: "trained"}


def test_a_chat_whose_answers_to_be_learned_are_all_empty_is_refused() -> None:
    messages = [user("1?"), assistant("A", train=False), user("2?"), assistant("")]
    with pytest.raises(RowError, match=r"message 4 is an empty answer, and no other is to be learned: remove the row"):
        render(tokenizer_of("trl/qwen2_5"), messages)


def test_a_template_that_looks_at_the_text_is_rendered_with_its_text() -> None:
    """Qwen3 takes a user message in tags for the result of a tool; the marker goes inside of them."""
    wrapped = user("<tool_response>\nsunny\n</tool_response>")
    messages = [user("Weather?"), assistant("Let me see.", reasoning_content="x"), wrapped, assistant("Sunny.")]
    first, last = trained(render(tokenizer_of("trl/qwen3"), messages))
    assert first == "<think>\nx\n</think>\n\nLet me see.<|im_end|>"
    assert last == "<think>\n\n</think>\n\nSunny.<|im_end|>"


def test_a_message_whose_marker_changes_the_text_is_found_by_its_content() -> None:
    greeting = tokenizer_with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content == 'Hi.' %}[greets] {% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [user("Hi."), assistant("Hello."), user("Well?"), assistant("Hi.")]
    chat = render(greeting, messages)
    assert trained(chat) == ["Hello.<|im_end|>", "[greets] Hi.<|im_end|>"]


def test_a_template_that_cuts_an_answer_is_a_problem() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('|')[-1] }}<|im_end|>\n{% endfor %}"
    chat = render(tokenizer_with_template(template), [user("1?"), assistant("A|B")])
    assert chat.outcomes == {1: "notRendered"}
    assert "does not render the whole content of message 2" in chat.problems[0]


def test_private_use_characters_in_a_text_are_rejected() -> None:
    with pytest.raises(RowError, match="private use"):
        render(tokenizer_of("trl/qwen2_5"), [user("1?"), assistant("\U000f0000")])
