"""Identifiers and module names use the field's terms: none holds a word that was retired for a standard one.

docs/adr/0030-folders-and-names.md lists old and new names. Only our own definitions are looked at: names that belong to
other libraries, such as the parameter `end=` of `print`, do not count.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

RETIRED = {
    "aim": "target, desired state",
    "aims": "target, desired state",
    "bury": "forget, remove",
    "end": "exit, result",
    "ending": "exit, result",
    "endings": "exits, results",
    "ends": "exits, results",
    "figures": "metrics, summary",
    "fewest": "minimum",
    "insist": "retry",
    "look": "poll, check",
    "looked": "polled, checked",
    "looks": "polls, checks",
    "mark": "segment, marker",
    "marks": "segments, markers",
    "muster": "ensure, start",
    "news": "new events",
    "nobody": "say what is skipped or missing",
    "outlast": "extend timeouts",
    "rest": "remainder",
    "room": "capacity, slots",
    "said": "response, message",
    "say": "report, log",
    "says": "reports, logs",
    "seen": "observed",
    "sentence": "message",
    "sentences": "messages",
    "sickness": "health problem",
    "situation": "context",
    "spoiled": "not finite",
    "stay": "run until terminated",
    "stays": "runs until terminated",
    "stood": "held, was",
    "stands": "holds, is",
    "tell": "notify",
    "tells": "notifies",
    "told": "notified",
    "trouble": "problem",
    "troubles": "problems",
    "understood": "parsed",
    "wanted": "desired",
    "words": "message, text",
}
"""Retired word -> the standard terms."""

EXCEPTIONS = {
    "end": "the bound of a range [start, end), as in Python and Arrow",
    "on_step_end": "a hook of transformers",
    "on_train_batch_end": "a hook of Lightning",
    "on_train_end": "a hook of Lightning",
}
"""Identifier -> why it may keep a retired word."""

SOURCES = [
    "api/spotune",
    "client/spotune_client",
    "operator/spotune_operator",
    "serve/spotune_serve",
    "trainer/spotune_train",
    "trainer/spotune_trainer",
]


def words_of(identifier: str) -> set[str]:
    """The words of a snake_case or CamelCase identifier, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def own_identifiers(source: str) -> Iterator[str]:
    """Every name that a module defines: functions, classes, parameters, variables, attributes and aliases."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def retired_names(path: Path) -> set[str]:
    """The identifiers of a module, its own name included, that hold a retired word and are no exception."""
    names = {path.stem, *own_identifiers(path.read_text())}
    return {name for name in names if words_of(name) & RETIRED.keys() and name not in EXCEPTIONS}


@pytest.mark.parametrize("folder", SOURCES)
def test_no_identifier_holds_a_retired_word(folder: str) -> None:
    modules = sorted((ROOT / folder).rglob("*.py"))
    assert modules
    found = {str(module.relative_to(ROOT)): sorted(retired_names(module)) for module in modules}
    assert {module: names for module, names in found.items() if names} == {}


def test_a_retired_word_is_found_in_any_kind_of_name(tmp_path: Path) -> None:
    module = tmp_path / "log_sentences.py"
    module.write_text(
        "import os as told\nclass Stay:\n    def look(self, said: int) -> None:\n        self.seen = said\n"
        "print('x', end='')\nfor figures in (): pass\n"
    )
    assert retired_names(module) == {"log_sentences", "told", "Stay", "look", "said", "seen", "figures"}


def test_every_exception_is_used() -> None:
    names = {
        name
        for folder in SOURCES
        for module in (ROOT / folder).rglob("*.py")
        for name in own_identifiers(module.read_text())
    }
    assert set(EXCEPTIONS) <= names
