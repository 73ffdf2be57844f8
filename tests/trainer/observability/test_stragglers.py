"""Which ranks count as slow: for how long, by how much, and where ranks have different numbers of micro-batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from spotune_trainer.observability.stragglers import StragglerMeter, slowness


@dataclass
class Group:
    """Ranks whose steps end when the slowest one has finished."""

    meter: StragglerMeter
    micro_batches: Sequence[int]
    now: float

    @classmethod
    def of(cls, *micro_batches: int) -> Group:
        group = cls(None, micro_batches, 1000.0)  # type: ignore[arg-type]
        nodes = [f"n{rank}" for rank in range(len(micro_batches))]
        group.meter = StragglerMeter(nodes, clock=lambda: group.now)
        return group

    def steps(self, count: int, *own_seconds: float) -> list[int]:
        """Make steps; returns the ranks that are named then."""
        for _ in range(count):
            self.now += max(own_seconds)
            self.meter.record(own_seconds, self.micro_batches)
        return [each.rank for each in self.meter.stragglers]


def test_rank_is_named_after_five_minutes_and_no_longer_once_it_is_as_fast_as_the_others() -> None:
    group = Group.of(1, 1, 1, 1)
    group.steps(60, 1.0, 1.0, 1.0, 1.0)
    assert group.steps(239, 0.8, 0.9, 1.25, 1.0) == []
    assert group.steps(61, 0.8, 0.9, 1.25, 1.0) == [2]
    (found,) = group.meter.stragglers
    assert (found.node, found.since) == ("n2", 1060.0)
    assert found.ratio == pytest.approx(1.25 / 0.9)
    assert group.meter.own_seconds == [0.8, 0.9, 1.25, 1.0]
    assert group.steps(60, 1.0, 1.0, 1.0, 1.0) == []


def test_long_steps_need_to_be_twenty() -> None:
    group = Group.of(1, 1)
    assert group.steps(19, 30.0, 60.0) == []
    assert group.steps(1, 30.0, 60.0) == [1]


def test_a_single_slow_step_names_nobody_and_a_rank_that_is_often_slow_is_named() -> None:
    group = Group.of(1, 1)
    group.steps(150, 1.0, 1.0)
    group.steps(1, 1.0, 200.0)
    assert group.steps(150, 1.0, 1.0) == []
    for _ in range(60):  # a disk that is slow in every tenth step: 1.45 of the other rank on average
        group.steps(9, 1.0, 1.0)
        group.steps(1, 1.0, 5.5)
    assert [each.rank for each in group.meter.stragglers] == [1]


@pytest.mark.parametrize(
    ("ranks", "slow"),
    [
        pytest.param([(2.0, 2), (1.0, 1), (1.0, 1)], set(), id="one more micro-batch"),
        pytest.param([(3.0, 2), (1.0, 1), (1.0, 1)], {0}, id="slow, and held up by its micro-batches"),
        pytest.param([(4.0, 4), (4.0, 4), (2.0, 1)], set(), id="slow, but nobody waits for it"),
        pytest.param([(2.0, 1), (2.0, 1), (0.1, 0)], set(), id="no micro-batch"),
        pytest.param([(1.0, 1)], set(), id="one rank"),
        pytest.param([(1.0, 1), (1.3, 1)], {1}, id="two ranks"),
        pytest.param([(0.0, 1), (0.0, 1)], set(), id="no time at all"),
    ],
)
def test_a_rank_is_slow_only_if_others_wait_for_it(ranks: list[tuple[float, int]], slow: set[int]) -> None:
    assert {rank for rank, ratio in enumerate(slowness(ranks)) if ratio > 1.2} == slow


@pytest.mark.parametrize(("ranks", "is_listed"), [(64, True), (65, False), (1000, False)])
def test_status_of_a_large_group_names_the_slowest_ranks_only(ranks: int, is_listed: bool) -> None:
    meter = StragglerMeter([f"n{rank}" for rank in range(ranks)], block_seconds=0.0, block_steps=1)
    assert meter.record([1.0 + rank / ranks for rank in range(ranks)], [1] * ranks)
    found = meter.as_json()
    assert found["ownSeconds"] == (meter.own_seconds if is_listed else None)
    assert [each["rank"] for each in found["slowestRanks"]] == [*range(ranks - 1, ranks - 9, -1)]
    assert found["slowestRanks"][0] == {"rank": ranks - 1, "node": f"n{ranks - 1}", "seconds": meter.own_seconds[-1]}
    assert len(json.dumps(found)) < 3000
