"""Which ranks are slower than the others, for long.

A rank is a straggler if it took more than `RATIO` of the median in each of the last `BLOCKS` blocks of steps. A block
has at least `BLOCK_SECONDS` and `BLOCK_STEPS`, so it takes five minutes and twenty steps. A single slow step, as of a
full volume, falls into one block; a disk that is slow in every tenth step makes all of them slow.

Ranks may have different numbers of micro-batches (three micro-batches on two ranks), and then take different times
without being slow. So a rank counts as slow only as far as it is both by its own time, since nobody waits for the
others, and by its time for each micro-batch.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Final

RATIO: Final = 1.2
BLOCKS: Final = 5
BLOCK_SECONDS: Final = 60.0
BLOCK_STEPS: Final = 4
MOST_LISTED: Final = 64
"""A status has the own times of all ranks of a group of up to so many. It is written and read twice a second."""
SLOWEST: Final = 8
"""So many of the slowest ranks are in the status of every group."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: 0-based.
        node: its node.
        ratio: its own time by the median of all ranks, in the last blocks.
        since: unix time at which the first of the blocks began in which it was slow.
    """

    rank: int
    node: str
    ratio: float
    since: float

    def as_json(self) -> dict[str, Any]:
        """As in `progress.json` and the ledger."""
        return {"rank": self.rank, "node": self.node, "ratio": round(self.ratio, 3), "since": round(self.since, 3)}


class StragglerMeter:
    """Compares the ranks of one worker group.

    Args:
        nodes: the node of each rank.
        block_seconds: shortest duration of a block.
        block_steps: least number of its steps.
        clock: unix time.

    Attributes:
        own_seconds: mean own time of a step in the last block, by rank; empty before its end.
        stragglers: as of the last block.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        block_seconds: float = BLOCK_SECONDS,
        block_steps: int = BLOCK_STEPS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._nodes = list(nodes)
        self._block_seconds = block_seconds
        self._block_steps = block_steps
        self._clock = clock
        self._closed: deque[list[tuple[float, int]]] = deque(maxlen=BLOCKS)
        self._slow_since: dict[int, float] = {}
        self.own_seconds: list[float] = []
        self.stragglers: list[Straggler] = []
        self._open()

    def as_json(self) -> dict[str, Any]:
        """As in `progress.json`: its size does not grow with the group beyond `MOST_LISTED` ranks."""
        own = self.own_seconds
        slowest = heapq.nlargest(SLOWEST, range(len(own)), key=own.__getitem__)
        worst = heapq.nlargest(MOST_LISTED, self.stragglers, key=lambda each: each.ratio)
        return {
            "ownSeconds": own if len(own) <= MOST_LISTED else None,
            "slowestRanks": [{"rank": rank, "node": self._nodes[rank], "seconds": own[rank]} for rank in slowest],
            "stragglers": [each.as_json() for each in sorted(worst, key=lambda each: each.rank)],
        }

    def _open(self) -> None:
        self._began, self._steps = self._clock(), 0
        self._block = [(0.0, 0)] * len(self._nodes)

    def record(self, own_seconds: Sequence[float], micro_batches: Sequence[int]) -> bool:
        """Count a step.

        Args:
            own_seconds: by rank.
            micro_batches: by rank.

        Returns:
            Whether a block has ended with it, so that the attributes are new.
        """
        self._block = [
            (seconds + more, count + further)
            for (seconds, count), more, further in zip(self._block, own_seconds, micro_batches, strict=True)
        ]
        self._steps += 1
        if self._steps < self._block_steps or self._clock() - self._began < self._block_seconds:
            return False
        self._close()
        return True

    def _close(self) -> None:
        self.own_seconds = [round(seconds / self._steps, 6) for seconds, _ in self._block]
        self._closed.append(self._block)
        slow = {rank for rank, ratio in enumerate(slowness(self._block)) if ratio > RATIO}
        self._slow_since = {rank: self._slow_since.get(rank, self._began) for rank in slow}
        self.stragglers = []
        if len(self._closed) == BLOCKS:
            ratios = [slowness(block) for block in self._closed]
            sums = [
                (math.fsum(seconds for seconds, _ in blocks), sum(count for _, count in blocks))
                for blocks in zip(*self._closed, strict=True)
            ]
            overall = slowness(sums)
            self.stragglers = [
                Straggler(rank, self._nodes[rank], overall[rank], self._slow_since[rank])
                for rank in sorted(slow)
                if all(ratio[rank] > RATIO for ratio in ratios)
            ]
        self._open()


def slowness(ranks: Sequence[tuple[float, int]]) -> list[float]:
    """How much slower than the median each rank is: the smaller one of its two ratios (see above).

    With an even number of ranks, the lower one of the two in the middle counts: of two ranks, the faster one.

    Args:
        ranks: own seconds and number of micro-batches.
    """
    by_time = [seconds for seconds, _ in ranks]
    by_micro_batch = [seconds / count if count else 0.0 for seconds, count in ranks]
    time_of_median = median_low(by_time)
    with_any = [seconds for seconds, (_, count) in zip(by_micro_batch, ranks, strict=True) if count]
    micro_batch_of_median = median_low(with_any) if with_any else 0.0
    return [
        min(_ratio(own, time_of_median), _ratio(each, micro_batch_of_median))
        for own, each in zip(by_time, by_micro_batch, strict=True)
    ]


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference > 0 else 1.0
