"""Reads YAML documents as Kubernetes does, and records the line of every field.

There are two differences from PyYAML's own loader: duplicate keys are errors (PyYAML uses the last one), and ``1e-4``
is a number as in YAML 1.2 (PyYAML reads it as a string). Files may be hostile, so what aliases can blow up is limited.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import yaml

from spotune.errors import JobError, Problem

FieldPath = tuple[str | int, ...]
"""Keys and list indices from the document's root, as written in the YAML."""

_MAX_VALUES: Final = 100_000
"""Values of a document, where each alias counts as often as it is used. An object of Kubernetes has thousands."""
_MAX_INTEGER_BITS: Final = 4096
"""Python refuses to print integers of more than 4300 digits."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One YAML document.

    Attributes:
        content: The document as plain Python values.
        file: Path as the user gave it.
        lines: Line number of every key and list item, starting at 1.
    """

    content: Any
    file: str = ""
    lines: dict[FieldPath, int] = field(default_factory=dict)

    @property
    def kind(self) -> Any:
        """The ``kind`` of a Kubernetes object; None for any other document."""
        return self.content.get("kind") if isinstance(self.content, dict) else None

    def line(self, path: FieldPath) -> int:
        """Line of a field or, if it is absent, of the nearest enclosing section; 0 if unknown."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the floating-point numbers of YAML 1.2."""

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        """Join the two halves (surrogates) that JSON writes a character such as an emoji with."""
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if _SURROGATE.search(node.value):
            try:
                node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
            except UnicodeDecodeError as error:
                problem = "an escape from \\ud800 to \\udfff is half a character: write the character itself"
                raise yaml.composer.ComposerError(None, None, problem, node.start_mark) from error
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; PyYAML lets other errors through, such as for the 99th day of a month."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            problem = f"a value that YAML reads as {node.tag.rpartition(':')[2]} is not one: {error}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
            raise yaml.constructor.ConstructorError(None, None, "a number has too many digits", node.start_mark)
        return value


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
    """Read all non-empty documents of a YAML file.

    Raises:
        JobError: The file cannot be read, is not text, or is not YAML; the message names file and line.
    """
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"is not a text file in UTF-8 (byte {error.start} cannot be decoded)"
        raise JobError(problems=[Problem(message, file=file)]) from error
    except OSError as error:
        raise JobError(problems=[Problem(f"cannot be read: {error.strerror}", file=file)]) from error
    try:
        return _compose(text, file)
    except yaml.YAMLError as error:
        raise JobError(problems=[_syntax_problem(error, file)]) from error
    except RecursionError as error:
        raise JobError(problems=[Problem("is nested too deeply", file=file)]) from error


def _compose(text: str, file: str) -> list[Document]:
    loader = _Loader(text)
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node() returned True"
            lines: dict[FieldPath, int] = {(): node.start_mark.line + 1}
            problems = _collect_lines(node, (), lines, (), count(1))
            if problems:
                raise JobError(
                    problems=[Problem(message, _dotted(path), file, line) for path, line, message in problems]
                )
            content = loader.construct_document(node)
            if content is not None:
                documents.append(Document(content, file, lines))
    finally:
        loader.dispose()
    return documents


def _dotted(path: FieldPath) -> str:
    return ".".join(str(part) for part in path)


def _collect_lines(
    node: yaml.Node,
    path: FieldPath,
    lines: dict[FieldPath, int],
    around: tuple[yaml.Node, ...],
    numbers: Iterator[int],
) -> list[tuple[FieldPath, int, str]]:
    """Record the line of everything in ``node``, and return duplicate keys and recursive aliases.

    Args:
        node: The node at ``path``.
        path: Path of the node.
        lines: Receives the line of every key and list item.
        around: The enclosing nodes, to detect an alias to one of them.
        numbers: Counts the values of the document.

    Returns:
        A tuple (path, line, message) for each problem.

    Raises:
        YAMLError: The document has too many values.
    """
    if next(numbers) > _MAX_VALUES:
        raise yaml.composer.ComposerError(
            None, None, f"with its aliases, it has more than {_MAX_VALUES:,} values", node.start_mark
        )
    if any(node is outer for outer in around):
        return [(path, node.start_mark.line + 1, "is an alias to a section that it is in itself")]
    problems: list[tuple[FieldPath, int, str]] = []
    children: list[tuple[FieldPath, int, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        children = [((*path, index), item.start_mark.line + 1, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        children = [((*path, str(key.value)), key.start_mark.line + 1, value) for key, value in node.value]
    first_lines: dict[FieldPath, int] = {}
    for child_path, line, child in children:
        if child_path in first_lines:
            problems.append((child_path, line, f"is given twice; the first is in line {first_lines[child_path]}"))
        first_lines[child_path] = lines[child_path] = line
        problems += _collect_lines(child, child_path, lines, (*around, node), numbers)
    return problems


def _syntax_problem(error: yaml.YAMLError, file: str) -> Problem:
    """PyYAML's error on one line, with a hint for the most common causes."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem(f"is not YAML: {' '.join(str(error).split())}", file=file)
    position = error.problem_mark or error.context_mark
    message = " ".join(part for part in (error.problem, error.context) if part)
    if position and error.context_mark and error.context_mark.line != position.line:
        message += f" that starts in line {error.context_mark.line + 1}"
    if "'\\t'" in message:
        message = "a tab is used for indentation; use spaces"
    elif "mapping values are not allowed" in message:
        message += " (indentation, or text with ': ' in it that needs quotes)"
    return Problem(f"is not YAML: {message}", file=file, line=position.line + 1 if position else 0)
