"""For a while, another function in the place of one that a library looks up by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Within it `owner` has that `function` by that name; afterwards the one it had."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)
