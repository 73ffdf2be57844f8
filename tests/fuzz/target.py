"""A parser to fuzz: what it reads, and what has to be true of every input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.database import ExampleDatabase
from hypothesis.strategies import SearchStrategy

from tests.fuzz.limits import limited


def check_names(error: Exception, *names: str) -> None:
    """Raise AssertionError unless the message has one of these names of a file, field or address."""
    message = str(error)
    message.encode()  # it can be printed
    assert any(name in message for name in names), message


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        name: for the command line.
        reads: what it reads, and where that is from; for the page.
        inputs: generates inputs.
        read: reads an input. Returns if the parser gave a value or its documented error, and raises otherwise.
        examples: inputs of a short run, which takes about a second.
    """

    name: str
    reads: str
    inputs: SearchStrategy[Any]
    read: Callable[[Any], None]
    examples: int = 100


def fuzz(target: Target, examples: int, database: ExampleDatabase | None = None) -> int:
    """Read that many inputs, failures of earlier runs first. Returns how many were read.

    Args:
        target: the parser.
        examples: inputs.
        database: keeps the inputs that fail, for the next run.

    Raises:
        Exception: what the parser raised for the smallest input that fails.
    """
    count = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=database,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(target.inputs)
    def read(value: Any) -> None:
        nonlocal count
        count += 1
        with limited():
            target.read(value)

    read()
    return count
