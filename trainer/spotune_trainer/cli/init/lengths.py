"""Maximum lengths for rows, from the lengths that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

_CUT_SHARE: Final = 0.01
"""Share of the rows that a maximum length may cut."""
_OUTLIERS: Final = 1.25
"""The longest row decides if it is at most so many times longer than the percentile of `_CUT_SHARE`."""
_LARGEST_PACKED: Final = 2048
_SMALLEST: Final = 16
_PACKED_ROWS: Final = 200
"""Packed rows that there should be at least, so that a step does not train on all of them."""


def percentile(lengths: Mapping[int, int], share: float) -> int:
    """The length in tokens that a share of the rows does not exceed (nearest-rank method).

    Args:
        lengths: Number of rows by length.
        share: Between 0 and 1.
    """
    rank = max(math.ceil(share * sum(lengths.values())), 1)
    counted = 0
    for length in sorted(lengths):
        counted += lengths[length]
        if counted >= rank:
            break
    else:
        raise ValueError("there are no rows")
    return length


def rows_cut(lengths: Mapping[int, int], limit: int) -> int:
    """Rows that are longer than a limit."""
    return sum(rows for length, rows in lengths.items() if length > limit)


def tokens_of(lengths: Mapping[int, int]) -> int:
    """Tokens of all rows."""
    return sum(length * rows for length, rows in lengths.items())


def max_length(lengths: Mapping[int, int], largest: int | None) -> int:
    """A maximum length that cuts at most 1 % of the rows, rounded up, and at most `largest`, if that is not None."""
    longest, most = max(lengths), percentile(lengths, 1 - _CUT_SHARE)
    needed = longest if longest <= _OUTLIERS * most else most
    step = 16 if needed <= 128 else 64 if needed <= 1024 else 256
    rounded = max(math.ceil(needed / step) * step, _SMALLEST)
    return rounded if largest is None else min(rounded, largest)


def packed_length(lengths: Mapping[int, int], largest: int | None) -> int:
    """The length of rows of packed text: a power of two up to 2048 that leaves enough rows to train on."""
    bound = min(_LARGEST_PACKED, largest or _LARGEST_PACKED)
    tokens, length = tokens_of(lengths), 128
    while 2 * length <= bound and tokens / (2 * length) >= _PACKED_ROWS:
        length *= 2
    return min(length, bound)
