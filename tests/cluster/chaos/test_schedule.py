"""Schedules are functions of their seed, overlap, and hit with every kind of fault before one is repeated."""

from itertools import pairwise

from tests.cluster.chaos.schedule import FaultKind, make_schedule

FAULTS = 20


def test_schedule_is_a_function_of_its_seed() -> None:
    assert make_schedule(3, FAULTS) == make_schedule(3, FAULTS)
    assert make_schedule(3, FAULTS).faults != make_schedule(4, FAULTS).faults
    assert len(make_schedule(3, FAULTS).faults) == FAULTS


def test_there_are_more_kinds_than_the_suite_promises() -> None:
    assert len(FaultKind) >= 20


def test_consecutive_seeds_hit_with_every_kind_before_one_is_repeated() -> None:
    seeds = -(-len(FaultKind) // FAULTS)
    kinds = [fault.kind for seed in range(1, seeds + 1) for fault in make_schedule(seed, FAULTS).faults]
    assert set(kinds) == set(FaultKind)
    assert max(kinds.count(kind) for kind in FaultKind) <= 2


def test_faults_overlap() -> None:
    """In every schedule some faults hit before the one before them is over."""
    for seed in range(1, 11):
        faults = make_schedule(seed, FAULTS).faults
        assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
        assert sum(after.at - before.at < before.seconds for before, after in pairwise(faults)) >= FAULTS // 4
        assert all(0 <= fault.target < 1 for fault in faults)
