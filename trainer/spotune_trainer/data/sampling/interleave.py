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
from fractions import Fraction


class Interleave:
    """How many of the first positions of a stream each source has. See the module for the formula.

    Args:
        weights: Share of each source, relative to the others; each more than 0.

    Attributes:
        shares: Of each source, with sum 1.
        strides: Whole numbers in proportion to ``W / w_i``: draw ``j`` of source ``i`` comes before another draw if its
            ``(2 * j + 1) * strides[i]`` is lower.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        total = sum(weights, Fraction(0))
        self.shares = [weight / total for weight in weights]
        self._total = math.lcm(*(share.denominator for share in self.shares))
        self._weights = [int(share * self._total) for share in self.shares]
        multiple = math.lcm(*self._weights)
        self.strides = [multiple // weight for weight in self._weights]
        self._slack = [self._total + (len(weights) - 2) * weight for weight in self._weights]

    def counts(self, position: int) -> list[int]:
        """How many of the positions before ``position`` each source has."""
        counts = self.least_counts(position)
        candidates = sorted(
            ((2 * draw + 1) * stride, source)
            for source, (first, last, stride) in enumerate(
                zip(counts, self.most_counts(position), self.strides, strict=True)
            )
            for draw in range(first, last)
        )
        for _, source in candidates[: position - sum(counts)]:
            counts[source] += 1
        return counts

    def least_counts(self, position: int) -> list[int]:
        """A lower bound of `counts`, from the bound in the module's docstring."""
        return [
            max(0, -((slack - 2 * position * weight) // (2 * self._total)))
            for weight, slack in zip(self._weights, self._slack, strict=True)
        ]

    def most_counts(self, position: int) -> list[int]:
        """An upper bound of `counts`, from the bound in the module's docstring."""
        return [
            (2 * position * weight + slack) // (2 * self._total)
            for weight, slack in zip(self._weights, self._slack, strict=True)
        ]
