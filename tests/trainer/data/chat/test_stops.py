"""At which token a trained turn ends."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from tests.trainer.data.chat.support.conversations import CONVERSATIONS, TOOLS, tokenizer_with
from tests.trainer.data.chat.support.own_templates import render, tokenizer_of, tokenizer_with_template, trained
from tests.trainer.data.chat.support.reference import REFERENCES

MULTI, CALLS = CONVERSATIONS["multi"], CONVERSATIONS["tools"]
TAGS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think> <arg_key> </arg_value> </TOOLCALL>"
"""Tags that some tokenizers have as tokens. No template ends an answer with one of them."""
GLM = ["trl/glm4moe", "llama.cpp/GLM-4.6", "llama.cpp/GLM-4.7-Flash"]


def with_tokens(template: str, *, special: str = "", added: str = "") -> PreTrainedTokenizerBase:
    reference = REFERENCES[template]
    return tokenizer_with(template, f"{reference.special} {special}", reference.eos, f"{reference.added} {added}")


@pytest.mark.parametrize("template", GLM)
@pytest.mark.parametrize("kind", ["special", "added"])
def test_a_model_without_a_closing_token_learns_to_stop_after_a_call(template: str, kind: str) -> None:
    """GLM's calls end with a token of the tokenizer, and the model stops at that of the next role."""
    call, *others = trained(render(with_tokens(template, **{kind: TAGS}), CALLS, tools=TOOLS))
    assert call.endswith("</tool_call><|observation|>")
    assert others[0].endswith("Sunny.<|user|>")


@pytest.mark.parametrize(
    ("special", "added"),
    [
        ("<|user|> <|assistant|> <|observation|> </tool_call>", ""),
        ("[gMASK] <sop>", "<|user|> <|assistant|> <|observation|> </tool_call>"),
    ],
    ids=["the beginning of a chat is no token", "roles are not special"],
)
def test_the_next_role_is_learned_whichever_tokens_are_special(special: str, added: str) -> None:
    tokenizer = tokenizer_with("trl/glm4moe", special, "<|endoftext|>", added)
    call, answer, _ = trained(render(tokenizer, CALLS, tools=TOOLS))
    assert call.endswith("</tool_call><|observation|>")
    assert answer.endswith("Sunny.<|user|>")


def test_a_call_without_the_closing_token_of_answers_ends_with_the_next_role() -> None:
    tokenizer = tokenizer_with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        "<tool_call>{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}</tool_call>"
        "{% else %}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    assert trained(render(tokenizer, CALLS)) == [
        '<tool_call>get_weather {"city": "Paris"}</tool_call><|im_start|>',
        "Sunny.<|im_end|>",
        "Welcome.<|im_end|>",
    ]


@pytest.mark.parametrize("template", REFERENCES)
def test_tags_that_are_tokens_change_nothing(template: str) -> None:
    plain = render(tokenizer_of(template), CALLS, tools=TOOLS)
    assert trained(render(with_tokens(template, added=TAGS), CALLS, tools=TOOLS)) == trained(plain)


@pytest.mark.parametrize("template", ["axolotl/chatml", "trl/qwen3"])
def test_a_closing_token_need_not_be_special(template: str) -> None:
    tokenizer = tokenizer_with(template, "<|im_start|>", "<|endoftext|>", "<|im_end|>")
    first, second, last, end = trained(render(tokenizer, MULTI))
    assert (first, second) == ("Ten.<|im_end|>", "Because.<|im_end|>")
    assert last.endswith("Yes.<|im_end|>")
    assert end == ""


def test_a_mark_that_ends_before_the_stop_after_a_call_is_extended_to_it() -> None:
    call, *_ = trained(render(tokenizer_of("trl/diffusion_gemma_training"), CALLS, tools=TOOLS))
    assert call.endswith("<tool_call|><|tool_response>")


@pytest.mark.parametrize(
    ("template", "trailing_whitespace", "expected"),
    [
        ("trl/gemma", False, ["Yes.<end_of_turn>", ""]),
        ("trl/gemma", True, ["Yes.<end_of_turn>\n"]),
        ("trl/phi3", False, ["Yes.<|end|>", "<|endoftext|>"]),
        ("trl/phi3", True, ["Yes.<|end|>\n<|endoftext|>"]),
        ("trl/phi3_training", False, ["Yes.<|end|>", "<|endoftext|>"]),
        ("trl/llama3", False, ["Yes.<|eot_id|>"]),
        ("llama.cpp/NVIDIA-Nemotron-Nano-v2", False, ["Yes.\n<SPECIAL_12>"]),
    ],
)
def test_whitespace_between_the_tokens_that_end_the_last_turn_is_not_learned(
    template: str, trailing_whitespace: bool, expected: list[str]
) -> None:
    chat = render(tokenizer_of(template), MULTI, trailing_whitespace=trailing_whitespace)
    assert trained(chat)[2:] == expected
    assert {span.turn for span in chat.spans[2:]} == {5}
