"""Tokenizers with chat templates of a test's own, and what they let a model learn."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from spotune_trainer.data.chat.messages import read_chat
from spotune_trainer.data.chat.renderer import ChatRenderer, TrainedChat
from tests.trainer.data.chat.support.conversations import tokenizer_with
from tests.trainer.data.chat.support.reference import REFERENCES


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    """A tokenizer with a template of ``golden`` and its tokens."""
    return REFERENCES[template].tokenizer


def tokenizer_with_template(text: str) -> PreTrainedTokenizerBase:
    """A tokenizer with the tokens of ChatML and another template."""
    tokenizer = tokenizer_with("axolotl/chatml", "<|im_start|>", "<|im_end|>")
    changed = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<pad>", chat_template=text
    )
    changed.name_or_path = "own"
    return changed


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> TrainedChat:
    """The rendered chat of ``messages``; ``tools`` are its tools, other options those of the renderer."""
    tools = options.pop("tools", None)
    row = {"chat": messages, "tools": tools}
    return ChatRenderer(tokenizer, **options).render(read_chat(row, "chat", "tools"))


def trained(chat: TrainedChat) -> list[str]:
    """The texts that are trained on. An empty one is the end-of-text token."""
    return [chat.text[span.start : span.end] for span in chat.spans]
