"""Wraps generated pages as written ones are: prose at 100 columns, commands at 80."""

from __future__ import annotations

import re
import textwrap

PROSE_COLUMNS = 100
CODE_COLUMNS = 80
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
"""A word of a command line; a quotation is one word."""


def wrap_page(page: str) -> str:
    """The page with its paragraphs and items of lists wrapped; code, tables and headings stay as they are."""
    parts = re.split(r"(^```.*?^```$)", page, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _wrap_prose(part) for part in parts)


def wrap_command(command: str) -> str:
    """A command on one line, or continued by backslashes before its options where it is too long."""
    words: list[str] = _WORD.findall(command)
    groups: list[str] = []
    for word in words:
        if groups and re.fullmatch(r"--?[a-z-]+", groups[-1]) and not word.startswith("-"):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    lines = groups[:1]
    for group in groups[1:]:
        if len(f"{lines[-1]} {group} \\") > CODE_COLUMNS:
            lines[-1] += " \\"
            lines.append(f"    {group}")
        else:
            lines[-1] += f" {group}"
    return "\n".join(lines)


def _wrap_prose(text: str) -> str:
    paragraphs = re.split(r"(\n\n+)", text)
    return "".join(_wrap_paragraph(paragraph) for paragraph in paragraphs)


def _wrap_paragraph(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if not paragraph.strip() or any(line.startswith(("|", "#")) for line in lines):
        return paragraph
    if any(line.startswith(("* ", "- ")) for line in lines):
        return "\n".join(_fill(line, indent="  ") if len(line) > PROSE_COLUMNS else line for line in lines)
    body = paragraph.strip("\n")
    before, _, after = paragraph.partition(body)
    return before + _fill(" ".join(body.split()), indent="") + after


def _fill(text: str, indent: str) -> str:
    return textwrap.fill(text, PROSE_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
