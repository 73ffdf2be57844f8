"""Which nodes of a simulated job can train: notices, nodes that start, and both at once."""

from __future__ import annotations

import pytest

from spotune.simulate.readiness import with_readiness
from spotune.simulate.supply import NodeSupply


def slots(points: list[tuple[float, int]], notice: float = 0.0, join: float = 0.0) -> list[tuple[float, int]]:
    """(seconds, workers that the next group can have) of every change of a job's spot nodes."""
    moments, before = [], 0
    for seconds, nodes in points:
        moments.append(NodeSupply(seconds, nodes, 0, max(0, before - nodes)))
        before = nodes
    return [(moment.seconds, moment.slots) for moment in with_readiness(iter(moments), notice, join)]


def test_nodes_without_notices_or_starts_are_slots_while_they_are_there() -> None:
    points = [(0.0, 4), (100.0, 3), (110.0, 4)]
    assert slots(points) == points


def test_node_that_was_announced_to_go_is_no_slot_from_then_on() -> None:
    assert slots([(0.0, 4), (300.0, 3), (500.0, 4)], notice=120.0) == [(0.0, 4), (180.0, 3), (300.0, 3), (500.0, 4)]


def test_notices_overlap() -> None:
    found = slots([(0.0, 4), (300.0, 3), (360.0, 1)], notice=120.0)
    assert found == [(0.0, 4), (180.0, 3), (240.0, 1), (300.0, 1), (360.0, 1)]


def test_loss_right_after_the_beginning_is_announced_at_the_beginning() -> None:
    assert slots([(0.0, 4), (60.0, 3)], notice=120.0) == [(0.0, 4), (0.0, 3), (60.0, 3)]


def test_node_is_a_slot_once_it_can_train() -> None:
    assert slots([(0.0, 3), (100.0, 4)], join=8.0) == [(0.0, 3), (100.0, 3), (108.0, 4)]


def test_newest_node_goes_first_whether_it_can_train_or_not() -> None:
    found = slots([(0.0, 3), (100.0, 4), (125.0, 3)], notice=20.0, join=8.0)
    assert found == [(0.0, 3), (100.0, 3), (105.0, 3), (108.0, 3), (125.0, 3)]


def test_node_that_joins_after_the_notice_of_another_stays() -> None:
    found = slots([(0.0, 3), (100.0, 4), (150.0, 3)], notice=120.0, join=8.0)
    assert found == [(0.0, 3), (30.0, 2), (100.0, 2), (108.0, 3), (150.0, 3)]


@pytest.mark.parametrize("notice", [0.0, 60.0, 5000.0])
def test_trace_that_never_ends_is_read_only_as_far_as_notices_reach(notice: float) -> None:
    endless = (NodeSupply(100.0 * number, 4 - number % 2, 0, number % 2) for number in range(10**9))
    moments = with_readiness(endless, notice, 5.0)
    assert all(0 <= next(moments).slots <= 4 for _ in range(50))
