"""Reads the pages of the repository: their blocks of code, and the commands that a reader types."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

_FOLDERS = ("*.md", "docs/**/*.md", "examples/**/*.md", "charts/*/*.md", "tests/cluster/*.md")
PAGES = sorted(page for pattern in _FOLDERS for page in ROOT.glob(pattern))
_BLOCK = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_SHELLS = ("console", "bash", "sh")


def page_name(page: Path) -> str:
    """The path of a page within the repository, by which a test names it."""
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: The word after the fence; empty without one.
        title: Name of the file that a reader makes of the block; empty without one.
        text: The lines of the block.
    """

    language: str
    title: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages."""
    found = [Block(*match.groups(default="")) for match in _BLOCK.finditer(page.read_text())]
    return [block for block in found if block.language in languages]


@dataclass(frozen=True)
class Line:
    """A command line that a reader types at one prompt.

    Attributes:
        text: The line, with its continuation lines.
        shown: Lines of output that the page shows below it.
    """

    text: str
    shown: tuple[str, ...] = ()

    def commands(self) -> Iterator[list[str]]:
        """Yields the words of each command in the line: of pipes, lists, loops and command substitutions."""
        tokens = shlex.shlex(self.text, posix=True, punctuation_chars=True)
        tokens.whitespace_split = True
        command: list[str] = []
        for token in [*tokens, ";"]:
            if re.fullmatch(r"[;|&()]+", token):
                yield from _simple(command)
                command = []
            else:
                command.append(token)


def lines(page: Path) -> Iterator[Line]:
    """Yields the command lines of a page in order."""
    for block in blocks(page, *_SHELLS):
        text = block.text.replace("\\\n", " ")
        if block.language == "console":
            for typed in re.split(r"^[$#] ", text, flags=re.MULTILINE)[1:]:
                first, *shown = typed.splitlines()
                while shown and not _is_whole(first):
                    first = f"{first}\n{shown.pop(0)}"
                yield Line(first, tuple(line for line in shown if line.strip()))
        else:
            yield from (Line(line) for line in text.splitlines())


def _is_whole(line: str) -> bool:
    """Whether every quotation that begins in the line also ends in it."""
    try:
        shlex.split(line)
    except ValueError:
        return False
    return True


def _simple(words: list[str]) -> Iterator[list[str]]:
    """Yields a command without the head of a loop, variables that it sets, and redirections."""
    if ">" in words:
        words = words[: words.index(">")]
    while words and (words[0] in ("do", "export") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    if words and words[0] not in ("for", "done"):
        yield words
