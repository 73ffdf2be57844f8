"""Looks ahead in an iterator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Lookahead(Generic[T]):
    """An iterator whose next elements can be looked at before they are taken."""

    def __init__(self, elements: Iterator[T]) -> None:
        self._elements = elements
        self._upcoming: deque[T] = deque()

    def peek(self, index: int = 0) -> T | None:
        """The upcoming element with the given index; None if there is none."""
        while len(self._upcoming) <= index:
            for element in self._elements:
                self._upcoming.append(element)
                break
            else:
                return None
        return self._upcoming[index]

    def take(self) -> T:
        """Remove the first upcoming element, which has been looked at; returns it."""
        return self._upcoming.popleft()
