"""Reduces a schedule that fails to few faults: delta debugging that halves prefixes.

Each run of a schedule takes minutes, so the number of runs counts: for k faults that fail together, it is about k times
the logarithm of the number of faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def reduced(
    faults: Sequence[T], fails: Callable[[Sequence[T]], bool], *, attempts: int = 1, limit: int = 100
) -> list[T]:
    """Return a part of the faults, in order, that was seen to fail; without any one of them it does not.

    The last fault of the shortest prefix that fails is needed. Then the same is done with the faults before it, which
    are always injected together with those that were found to be needed.

    Args:
        faults: a list that fails.
        fails: runs a list. A cluster is not deterministic, so it may return False by chance.
        attempts: how often a list is run until it counts as passed.
        limit: maximum number of runs; then the shortest list so far is returned.
    """
    runs = 0

    def fails_once(part: Sequence[T]) -> bool:
        nonlocal runs
        for _ in range(attempts):
            if runs >= limit:
                return False
            runs += 1
            if fails(part):
                return True
        return False

    before, needed = list(faults), list[T]()
    while before and runs < limit and not (needed and fails_once(needed)):
        length = _shortest(before, needed, fails_once)
        before, needed = before[: length - 1], [before[length - 1], *needed]
    return needed if not before or runs < limit else [*before, *needed]


def _shortest(before: Sequence[T], needed: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> int:
    """The length of the shortest prefix that fails together with the needed faults; the whole list does."""
    low, high = 1, len(before)
    while low < high:
        middle = (low + high) // 2
        if fails([*before[:middle], *needed]):
            high = middle
        else:
            low = middle + 1
    return high
