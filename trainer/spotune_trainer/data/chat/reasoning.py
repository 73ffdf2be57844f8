"""Reasoning within the content of a message, as DeepSeek and Qwen, Seed-OSS, Mistral and Gemma 4 write it."""

from __future__ import annotations

import re

_OPENING = re.compile(r"<think>|<thinking>|<seed:think>|\[THINK\]|<\|channel>thought")
_CLOSING = re.compile(r"</think>|</thinking>|</seed:think>|\[/THINK\]|<channel\|>")


def split_reasoning(content: str) -> tuple[list[str], str]:
    """The reasoning in a content, and the content without it.

    A closing tag ends reasoning. All text since the closing tag before it is reasoning, without an opening tag that
    this text begins with: many prompts already have the opening tag. Takes time linear in the length of the content.

    Args:
        content: The content of a message.
    """
    reasoning: list[str] = []
    position = 0
    for closing in _CLOSING.finditer(content):
        opening = _OPENING.match(content, position, closing.start())
        reasoning.append(content[opening.end() if opening else position : closing.start()])
        position = closing.end()
    return reasoning, content[position:]
