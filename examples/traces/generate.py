"""Generates the spot traces of this folder: random walks with the statistics of published traces, not recordings.

`p3-32.csv` has the statistics of the trace of 32 p3.2xlarge on AWS with which Bamboo was evaluated (Thorpe et al.,
NSDI 2023; github.com/uclasystem/bamboo, traces/p3-trace.csv), `v100-4.csv` those of four V100 nodes in us-west-2c over
18 days (Wu et al., "Can't Be Late", NSDI 2024; github.com/skypilot-org/spot-traces, preemption/4-node/aws-08-03-2023).
README.md lists the statistics, and how well they match.

    python examples/traces/generate.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

FOLDER = Path(__file__).parent
HOUR = 3600.0
P3_SEED, V100_SEED = 77, 118
"""Seeds whose walks come close to the published statistics in their short time, chosen from many."""

P3_NODES = 32
P3_REMOVALS_PER_HOUR = 79 / 11.37
P3_NODES_PER_REMOVAL = {1: 39, 2: 13, 3: 15, 4: 7, 5: 1, 6: 4}
"""Number of removals by how many nodes they took at once, in 11.37 h."""
P3_ADDITIONS_PER_HOUR = 11.0
P3_RETURNS = 0.16
"""Probability that a missing node returns with an addition. An addition without any node is invisible. With this value,
the visible additions and the mean number of nodes are as published."""

V100_HOURS = {0: 68.92, 1: 5.92, 2: 5.92, 3: 9.25, 4: 337.58}
"""Hours by number of available nodes, of 427.6 h."""
V100_CHANGES: Mapping[int, Mapping[int, int]] = {
    0: {1: 24, 2: 15, 3: 21, 4: 17},
    1: {0: 25, 2: 13, 3: 6, 4: 11},
    2: {0: 21, 1: 9, 3: 7, 4: 18},
    3: {0: 18, 1: 7, 2: 11, 4: 44},
    4: {0: 13, 1: 15, 2: 16, 3: 46},
}
"""Number of changes by (nodes before, nodes after), in that time."""

Points = list[tuple[float, int]]
"""(seconds, nodes from then on); the last point is the end of the trace."""


@dataclass(frozen=True)
class Statistics:
    """Statistics by which traces are compared.

    Attributes:
        mean: mean number of nodes over time.
        removals_per_hour: number of times per hour at which nodes are removed.
        nodes_per_removal: mean number of nodes removed at such a time.
        additions_per_hour: number of times per hour at which nodes are added.
        all_there: fraction of time with the maximum number of nodes.
        none_there: fraction of time without any node.
    """

    mean: float
    removals_per_hour: float
    nodes_per_removal: float
    additions_per_hour: float
    all_there: float
    none_there: float


def p3_points(seconds: float, seed: int) -> Points:
    """Nodes are removed and added at random times (Poisson processes), as many at once as in the published trace."""
    random = Random(seed)
    points, now, nodes = [(0.0, P3_NODES)], 0.0, P3_NODES
    while True:
        now += random.expovariate((P3_REMOVALS_PER_HOUR + P3_ADDITIONS_PER_HOUR) / HOUR)
        if now >= seconds:
            return [*points, (seconds, nodes)]
        if random.random() < P3_REMOVALS_PER_HOUR / (P3_REMOVALS_PER_HOUR + P3_ADDITIONS_PER_HOUR):
            nodes -= min(nodes, _drawn(random, P3_NODES_PER_REMOVAL))
        else:
            nodes += sum(random.random() < P3_RETURNS for _ in range(P3_NODES - nodes))
        _add(points, now, nodes)


def v100_points(seconds: float, seed: int) -> Points:
    """A Markov chain over the number of nodes: the time in a state is exponential, with the published mean."""
    random = Random(seed)
    points, now, nodes = [(0.0, 4)], 0.0, 4
    while True:
        changes = V100_CHANGES[nodes]
        now += random.expovariate(sum(changes.values()) / V100_HOURS[nodes] / HOUR)
        if now >= seconds:
            return [*points, (seconds, nodes)]
        nodes = _drawn(random, changes)
        _add(points, now, nodes)


def statistics(points: Points) -> Statistics:
    """The statistics of a trace."""
    pieces = [(later - seconds, nodes) for (seconds, nodes), (later, _) in pairwise(points)]
    seconds = points[-1][0]
    changes = [after - before for (_, before), (_, after) in pairwise(points)]
    removals = [-change for change in changes if change < 0]
    most = max(nodes for _, nodes in points)
    return Statistics(
        mean=sum(length * nodes for length, nodes in pieces) / seconds,
        removals_per_hour=len(removals) / seconds * HOUR,
        nodes_per_removal=sum(removals) / len(removals),
        additions_per_hour=sum(change > 0 for change in changes) / seconds * HOUR,
        all_there=sum(length for length, nodes in pieces if nodes == most) / seconds,
        none_there=sum(length for length, nodes in pieces if nodes == 0) / seconds,
    )


def traces() -> Iterator[tuple[Path, Points]]:
    """The traces of this folder, by file name."""
    yield FOLDER / "p3-32.csv", p3_points(12 * HOUR, seed=P3_SEED)
    yield FOLDER / "v100-4.csv", v100_points(7 * 24 * HOUR, seed=V100_SEED)


def text(points: Points) -> str:
    """A trace as CSV."""
    return "".join(["seconds,nodes\n", *(f"{seconds:.0f},{nodes}\n" for seconds, nodes in points)])


def _drawn(random: Random, weights: Mapping[int, int]) -> int:
    return random.choices(list(weights), list(weights.values()))[0]


def _add(points: Points, now: float, nodes: int) -> None:
    """Add a change, at a whole second."""
    seconds = float(round(now))
    if nodes == points[-1][1]:
        return
    if seconds == points[-1][0]:
        points.pop()
    points.append((seconds, nodes))


if __name__ == "__main__":
    for file, points in traces():
        file.write_text(text(points), encoding="utf-8")
        print(file.name, statistics(points))
