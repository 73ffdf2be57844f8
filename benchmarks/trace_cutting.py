"""Makes a trace of many nodes and many hours one that a single machine plays in minutes. Pure functions.

The rule, in this order:

1. Scale: the most nodes of the trace become `most`, other numbers of nodes in proportion, rounded to the nearest, at
   least one. A change that is too small to change the rounded number is left out.
2. Cut: of the time between two changes, and of that before the first and after the last one, at most `quiet` seconds
   remain. Shorter times remain as they are.
3. Take the first `seconds` of what remains.

What happens around a change is not altered if `quiet` is longer than a notice, the time until a group may grow
(`workers.resizeCooldown`), and a recovery take together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from spotune.simulate.trace import Trace


@dataclass(frozen=True)
class CutTrace:
    """A trace to play.

    Attributes:
        trace: the trace.
        scaled_changes: number of changes of the whole trace after it was scaled.
        covered_seconds: time of the original trace that it stands for.
    """

    trace: Trace
    scaled_changes: int
    covered_seconds: float

    @property
    def changes(self) -> int:
        """Number of changes that it has."""
        return len(self.trace.changes) - 1


def most_nodes(trace: Trace) -> int:
    """The most nodes that a trace ever has."""
    return max(nodes for _, nodes in trace.changes)


def scale(trace: Trace, most: int) -> Trace:
    """A trace with at most `most` nodes; the numbers of nodes are in proportion."""
    largest = most_nodes(trace)
    points: list[tuple[float, int]] = []
    for seconds, nodes in trace.changes:
        scaled = max(1, (2 * nodes * most + largest) // (2 * largest))
        if not points or points[-1][1] != scaled:
            points.append((seconds, scaled))
    return Trace(tuple(points), trace.seconds)


def cut(trace: Trace, most: int, quiet: float, seconds: float) -> CutTrace:
    """The trace to play.

    Args:
        trace: the original.
        most: nodes.
        quiet: longest time between two changes that remains, in seconds.
        seconds: longest length.
    """
    scaled = scale(trace, most)
    points: list[tuple[float, int]] = []
    now, covered = 0.0, 0.0
    for (begin, nodes), (end, _) in pairwise([*scaled.changes, (scaled.seconds, 0)]):
        points.append((now, nodes))
        remains = min(end - begin, quiet)
        if now + remains >= seconds:
            return CutTrace(Trace(tuple(points), seconds), len(scaled.changes) - 1, begin + seconds - now)
        now, covered = now + remains, end
    return CutTrace(Trace(tuple(points), now), len(scaled.changes) - 1, covered)
