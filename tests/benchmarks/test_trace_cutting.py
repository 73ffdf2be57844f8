"""How a trace becomes one that a single machine plays in minutes."""

from __future__ import annotations

import pytest

from benchmarks.trace_cutting import cut, most_nodes, scale
from benchmarks.trace_runs import FOLDER, QUIET_SECONDS, TRACES, Action, schedule
from spotune.simulate.trace import Trace, read_trace

HOUR = 3600.0
TRACE = Trace(((0.0, 32), (600.0, 30), (660.0, 24), (3000.0, 4), (3060.0, 1)), HOUR)


def test_nodes_are_scaled_in_proportion_and_small_changes_left_out() -> None:
    assert scale(TRACE, 8).changes == ((0.0, 8), (660.0, 6), (3000.0, 1))
    assert scale(TRACE, 32) == TRACE


def test_quiet_stretches_are_cut_and_others_keep_their_length() -> None:
    found = cut(TRACE, 32, quiet=180.0, seconds=1200.0)
    assert found.trace == Trace(((0.0, 32), (180.0, 30), (240.0, 24), (420.0, 4), (480.0, 1)), 660.0)
    assert (found.changes, found.scaled_changes, found.covered_seconds) == (4, 4, HOUR)


def test_long_trace_is_played_from_its_beginning() -> None:
    found = cut(TRACE, 32, quiet=180.0, seconds=300.0)
    assert found.trace == Trace(((0.0, 32), (180.0, 30), (240.0, 24)), 300.0)
    assert (found.changes, found.scaled_changes) == (2, 4)
    assert found.covered_seconds == 660.0 + 60.0


@pytest.mark.parametrize("name", TRACES)
def test_every_committed_trace_can_be_played(name: str) -> None:
    trace = read_trace(FOLDER / TRACES[name])
    found = cut(trace, 8, QUIET_SECONDS, 1200.0)
    assert found.trace.seconds <= 1200.0
    assert found.covered_seconds <= trace.seconds
    assert 2 <= found.changes <= found.scaled_changes
    assert most_nodes(scale(trace, 8)) == 8
    lost = sum(action.lost for action in schedule(found.trace, 120.0) if action.deadline is None)
    joining = sum(action.joining for action in schedule(found.trace, 120.0))
    assert found.trace.changes[0][1] + joining - lost == found.trace.changes[-1][1]


def test_losses_are_announced_and_then_happen() -> None:
    trace = Trace(((0.0, 4), (60.0, 3), (200.0, 4), (300.0, 2)), 400.0)
    assert schedule(trace, 120.0) == [
        Action(0.0, lost=1, deadline=60.0),
        Action(60.0, lost=1),
        Action(180.0, lost=2, deadline=300.0),
        Action(200.0, joining=1),
        Action(300.0, lost=2),
    ]
    assert [action.deadline for action in schedule(trace, 0.0)] == [None] * 3
