"""The pages of the repository as a reader takes them: blocks of code, and the commands in those that are typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FOLDERS = ("*.md", "docs/**/*.md", "examples/**/*.md", "charts/*/*.md", "tests/cluster/*.md")
PAGES = sorted(page for pattern in _FOLDERS for page in ROOT.glob(pattern))
_BLOCK = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_SHELLS = ("console", "bash", "sh")


def page_name(page: Path) -> str:
    """The path that a test says which page it is about by."""
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: After the fence; empty where nothing is there.
        title: The file that a reader makes of it, where it says one.
        text: Its lines.
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
    """What is typed at one prompt.

    Attributes:
        text: The line, with what it is continued by.
        shown: Lines that the page has below it.
    """

    text: str
    shown: tuple[str, ...] = ()

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of it: those of a pipe, a list, a loop, or within another one."""
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
    """What a page has typed, in its order."""
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
    """Whether every quotation in the line ends in it."""
    try:
        shlex.split(line)
    except ValueError:
        return False
    return True


def _simple(words: list[str]) -> Iterator[list[str]]:
    """A command without what is around it: the head of a loop, variables that it sets, and where its output goes."""
    if ">" in words:
        words = words[: words.index(">")]
    while words and (words[0] in ("do", "export") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    if words and words[0] not in ("for", "done"):
        yield words
