"""The order in which a stream takes its samples from several sources, in a closed form.

With weights ``w_i`` of sum ``W``, draw ``j`` of source ``i`` (both from 0) has the time

    t(i, j) = (j + 1/2) * W / w_i

and the stream is all draws sorted by time; of draws with the same time, that of the source that is listed first comes
first. So a source's draws are spread evenly: at time ``t`` it has drawn ``t * w_i / W`` samples, rounded. This is
stride scheduling (Waldspurger and Weihl, MIT/LCS/TM-528, 1995) with each first draw after half a stride.

After ``n`` samples the count of source ``i`` is within ``(1 + (k - 2) * w_i / W) / 2`` of ``n * w_i / W``, where ``k``
is the number of sources: at most 1 for up to three sources, and for every source whose share is at most
``1 / (k - 2)``. It is exact where ``n`` is a multiple of ``W``, for weights that are whole numbers.

All arithmetic is on integers, so no rounding of a machine can move a sample. Nothing is walked from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

_LARGEST_KEY = 1 << 62
_TEMPERATURE_DIGITS = 6  # significant digits of a weight that a temperature gives


class Interleave:
    """The source of every position of a stream. See the module for the formula.

    Args:
        weights: Share of each source, relative to the others; each more than 0.

    Attributes:
        shares: Of each source, with sum 1.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        total = sum(weights, Fraction(0))
        self.shares = [weight / total for weight in weights]
        denominator = math.lcm(*(share.denominator for share in self.shares))
        self._weights = [int(share * denominator) for share in self.shares]
        self._total = denominator
        multiple = math.lcm(*self._weights)
        self._strides = [multiple // weight for weight in self._weights]

    def draws(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The source of each position from ``start`` up to ``stop``, and the number of its draw, both from 0."""
        sources, numbers = self._sorted_draws(start, stop)
        skipped = start - sum(self._least_counts(start))
        chosen = slice(skipped, skipped + stop - start)
        return sources[chosen], numbers[chosen]

    def counts(self, position: int) -> list[int]:
        """How many of the positions before ``position`` each source has."""
        least = self._least_counts(position)
        sources, _ = self._sorted_draws(position, position)
        more = np.bincount(sources[: position - sum(least)], minlength=len(least)).tolist()
        return [count + added for count, added in zip(least, more, strict=True)]

    def _sorted_draws(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source and number of draws in the order of the stream: at least those from ``start`` up to ``stop``.

        The first one is at position ``sum(_least_counts(start))``.
        """
        ranges = [
            np.arange(first, last, dtype=np.int64)
            for first, last in zip(self._least_counts(start), self._most_counts(stop), strict=True)
        ]
        numbers = np.concatenate(ranges)
        sources = np.repeat(np.arange(len(ranges)), [len(each) for each in ranges])
        largest = max((2 * int(each[-1]) + 1) * stride for each, stride in self._with_strides(ranges) if len(each))
        kind: Any = np.int64 if largest < _LARGEST_KEY else object
        times = np.concatenate([(2 * each.astype(kind) + 1) * stride for each, stride in self._with_strides(ranges)])
        order = np.argsort(times, kind="stable")  # draws with the same time stay in the order of the sources
        return sources[order], numbers[order]

    def _with_strides(self, ranges: list[npt.NDArray[np.int64]]) -> list[tuple[npt.NDArray[np.int64], int]]:
        return list(zip(ranges, self._strides, strict=True))

    def _least_counts(self, position: int) -> list[int]:
        """A lower bound of `counts`, from the bound in the module's docstring."""
        slack = [self._total + (len(self._weights) - 2) * weight for weight in self._weights]
        return [
            max(0, -(-(2 * position * weight - each) // (2 * self._total)))
            for weight, each in zip(self._weights, slack, strict=True)
        ]

    def _most_counts(self, position: int) -> list[int]:
        """An upper bound of `counts`, plus one."""
        slack = [self._total + (len(self._weights) - 2) * weight for weight in self._weights]
        return [
            (2 * position * weight + each) // (2 * self._total) + 1
            for weight, each in zip(self._weights, slack, strict=True)
        ]


def exact_weight(weight: float) -> Fraction:
    """A weight as it is written: 0.1 is one tenth, not the nearest binary fraction."""
    return Fraction(repr(weight))


def temperature_weights(sizes: Sequence[int], temperature: float) -> list[Fraction]:
    """Weights proportional to ``size ** (1 / temperature)``, of six significant digits; the sizes themselves for 1.

    Temperature-scaled mixing of Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (JMLR 21, 2020), section 3.5.2. Decimal arithmetic rounds alike on every machine.
    """
    if temperature == 1:
        return [Fraction(size) for size in sizes]
    with localcontext(Context(prec=28)):
        powers = [(Decimal(size).ln() / Decimal(repr(temperature))).exp() for size in sizes]
        return [Fraction(Context(prec=_TEMPERATURE_DIGITS).plus(power)) for power in powers]
