"""Writes choices as a job file: YAML with the reason for each value above it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

import yaml

from spotune.custom_resource import API_VERSION
from spotune.job import KIND
from spotune_trainer.cli.init.profiles import Choice

_WIDTH: Final = 100
_ENDLESS: Final = 1 << 30
_PLAIN: Final = frozenset(
    {
        *("source", "prompt", "completion", "text", "messages", "tools", "chosen", "rejected", "name", "tokenizer"),
        *("label", "labels", "query", "positive", "negative"),
    }
)
"""Fields with texts of the user, which are always quoted."""


def content_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """The job as plain values. Choices without a value are left out."""
    content: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND}
    for choice in choices:
        if choice.value is not None:
            *parents, name = choice.path.split(".")
            section = content
            for parent in parents:
                section = section.setdefault(parent, {})
            section[name] = choice.value
    return content


def render_job_file(choices: Sequence[Choice], head: str) -> str:
    """The text of a job file. Choices of one section have to follow each other.

    Args:
        choices: The fields, in the order of the file.
        head: Comment at the top; empty lines divide its paragraphs, and indented lines are kept as they are.
    """
    lines = [*_comment(head, 0), f"apiVersion: {API_VERSION}", f"kind: {KIND}"]
    open_sections: list[str] = []
    for choice in choices:
        *parents, name = choice.path.split(".")
        common = 0
        while common < min(len(parents), len(open_sections)) and parents[common] == open_sections[common]:
            common += 1
        lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(common, len(parents))]
        open_sections = parents
        lines += _comment(choice.reason, len(parents))
        if choice.value is not None:
            lines.append(f"{'  ' * len(parents)}{name}: {_scalar(name, choice.value)}")
    return "\n".join(lines) + "\n"


def _comment(text: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for paragraph in text.splitlines():
        prefix = f"{indent}# "
        # YAML allows no control characters, not even in comments, but names of columns may have some.
        printable = "".join(character if character.isprintable() else " " for character in paragraph)
        if printable.startswith("  "):
            yield prefix + printable
            continue
        wrapped = textwrap.wrap(printable, _WIDTH - len(prefix), break_long_words=False, break_on_hyphens=False)
        yield from ((prefix + line).rstrip() for line in wrapped or [""])


def _scalar(name: str, value: Any) -> str:
    style = '"' if name in _PLAIN else None
    text = yaml.safe_dump(
        value, default_style=style, default_flow_style=True, allow_unicode=True, width=_ENDLESS, sort_keys=False
    )
    return text.removesuffix("...\n").strip()
