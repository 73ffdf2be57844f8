"""YAML documents with the line of every field, read the way Kubernetes reads them.

Two things differ from PyYAML's own loader: a key that is given twice is an error (PyYAML takes the last), and ``1e-4``
is a number (YAML 1.2; PyYAML takes it for text).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from spotune.errors import JobError, Problem

FieldPath = tuple[str | int, ...]
"""Keys and list indices from the document's root, as they are written in the YAML."""


@dataclass(frozen=True)
class Document:
    """One YAML document.

    Attributes:
        content: Its plain Python value.
        file: The file as the user named it.
        lines: Line of every key and list item, from 1.
    """

    content: Any
    file: str = ""
    lines: dict[FieldPath, int] = field(default_factory=dict)

    @property
    def kind(self) -> Any:
        """The ``kind`` of a Kubernetes object, None for anything else."""
        return self.content.get("kind") if isinstance(self.content, dict) else None

    def line(self, path: FieldPath) -> int:
        """Line of a field, or of the nearest section around it that is there; 0 if nothing is known."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the floating point numbers of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf|\.nan)$"
    ),
    list("-+.0123456789"),
)


def read_documents(path: Path) -> list[Document]:
    """All documents of a YAML file that are not empty.

    Raises:
        JobError: The file cannot be read, is not text, or is not YAML; file and line are named.
    """
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        what = f"is not a text file in UTF-8 (byte {error.start} cannot be decoded)"
        raise JobError(problems=[Problem(what, file=file)]) from error
    except OSError as error:
        raise JobError(problems=[Problem(f"cannot be read: {error.strerror}", file=file)]) from error
    try:
        return _compose(text, file)
    except yaml.YAMLError as error:
        raise JobError(problems=[_syntax_problem(error, file)]) from error
    except RecursionError as error:
        raise JobError(problems=[Problem("is nested too deeply for a job file", file=file)]) from error


def _compose(text: str, file: str) -> list[Document]:
    loader = _Loader(text)
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node() has seen it"
            lines: dict[FieldPath, int] = {(): node.start_mark.line + 1}
            problems = _collect_lines(node, (), lines, ())
            if problems:
                raise JobError(problems=[Problem(what, _dotted(path), file, line) for path, line, what in problems])
            content = loader.construct_document(node)
            if content is not None:
                documents.append(Document(content, file, lines))
    finally:
        loader.dispose()
    return documents


def _dotted(path: FieldPath) -> str:
    return ".".join(str(part) for part in path)


def _collect_lines(
    node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int], around: tuple[yaml.Node, ...]
) -> list[tuple[FieldPath, int, str]]:
    """Fills ``lines`` for everything in ``node``; returns (path, line, problem) of keys given twice and the like.

    Args:
        node: The node at ``path``.
        path: Where the node is.
        lines: Filled with the line of every key and item.
        around: The nodes that hold this one, to notice an alias to one of them.
    """
    if any(node is outer for outer in around):
        return [(path, node.start_mark.line + 1, "is an alias to a section that it is in itself")]
    problems: list[tuple[FieldPath, int, str]] = []
    children: list[tuple[FieldPath, int, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        children = [((*path, index), item.start_mark.line + 1, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        children = [((*path, str(key.value)), key.start_mark.line + 1, value) for key, value in node.value]
    seen: dict[FieldPath, int] = {}
    for child_path, line, child in children:
        if child_path in seen:
            problems.append((child_path, line, f"is given twice; the first is in line {seen[child_path]}"))
        seen[child_path] = lines[child_path] = line
        problems += _collect_lines(child, child_path, lines, (*around, node))
    return problems


def _syntax_problem(error: yaml.YAMLError, file: str) -> Problem:
    """PyYAML's error in one line, with the hint that helps most often."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem(f"is not YAML: {' '.join(str(error).split())}", file=file)
    mark = error.problem_mark or error.context_mark
    what = " ".join(part for part in (error.problem, error.context) if part)
    if mark and error.context_mark and error.context_mark.line != mark.line:
        what += f" that starts in line {error.context_mark.line + 1}"
    if "'\\t'" in what:
        what = "a tab is used for indentation; use spaces"
    elif "mapping values are not allowed" in what:
        what += " (indentation, or text with ': ' in it that needs quotes)"
    return Problem(f"is not YAML: {what}", file=file, line=mark.line + 1 if mark else 0)
