"""Schedules are functions of their seed, overlap, and hit with every kind of fault before one is repeated."""

from itertools import pairwise

from tests.cluster.chaos.chaos_run import STEP_SECONDS, STEPS
from tests.cluster.chaos.schedule import FAULTS, JOBS, FaultKind, from_json, make_schedule, to_json

SEEDS = range(1, 51)


def test_schedule_is_a_function_of_its_seed() -> None:
    assert make_schedule(3) == make_schedule(3)
    assert make_schedule(3).faults != make_schedule(4).faults
    assert len(make_schedule(3).faults) == FAULTS


def test_there_are_more_kinds_than_the_suite_promises() -> None:
    assert len(FaultKind) >= 60


def test_consecutive_seeds_hit_with_every_kind_before_one_is_repeated() -> None:
    seeds = -(-len(FaultKind) // FAULTS)
    kinds = [fault.kind for seed in range(1, seeds + 1) for fault in make_schedule(seed).faults]
    assert set(kinds) == set(FaultKind)
    assert max(kinds.count(kind) for kind in FaultKind) <= 2


def test_faults_overlap() -> None:
    """In every schedule some faults hit before the one before them is over."""
    for seed in SEEDS:
        faults = make_schedule(seed).faults
        assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
        assert sum(after.at - before.at < before.seconds for before, after in pairwise(faults)) >= FAULTS // 4
        assert all(0 <= fault.target < 1 for fault in faults)
        assert {fault.job for fault in faults} == set(range(JOBS))


def test_jobs_do_not_end_before_the_faults() -> None:
    """Not even a job that is never disturbed; ten minutes more than it has are not needed either."""
    longest = max(make_schedule(seed).faults[-1].at for seed in SEEDS)
    assert longest < STEPS * STEP_SECONDS < longest + 600


def test_schedule_is_read_from_the_json_that_was_written() -> None:
    whole = make_schedule(7)
    short = whole.with_faults(whole.faults[3:6])
    assert from_json(to_json(short)) == short
    assert len(to_json(short).splitlines()) == 5
