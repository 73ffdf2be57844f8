"""Temporarily replace a function that a library looks up by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Within it `owner.name` is `function`; afterwards it is again what it was."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)
