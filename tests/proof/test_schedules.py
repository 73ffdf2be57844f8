"""All schedules cover every required combination, and each can run."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from tests.proof.schedules import (
    CHANGES,
    COMPARED_STEPS,
    FIRST_LABELS_SEED,
    FIRST_MIXTURE_SEED,
    FIRST_PAIRS_SEED,
    KILLS,
    KILLS_AND_POINTS,
    STEPS,
    WORLD_SIZES,
    ZERO_STAGES,
    Data,
    FaultKind,
    InjectionPoint,
    Schedule,
    make_schedule,
)

SEEDS = range(1, 81)
SCHEDULES = [make_schedule(seed) for seed in SEEDS]


def test_schedule_is_a_function_of_its_seed() -> None:
    assert [make_schedule(seed) for seed in SEEDS] == SCHEDULES
    assert len({(schedule.world_size, schedule.faults) for schedule in SCHEDULES}) == len(SEEDS)


def test_every_kill_is_injected_at_every_point() -> None:
    found = {(each.kind, each.point) for schedule in SCHEDULES for each in schedule.faults}
    assert set(KILLS_AND_POINTS) <= found
    assert {kind for kind, _ in found} == set(FaultKind)


def test_every_change_of_world_size_occurs_at_least_twice() -> None:
    changes = [change for schedule in SCHEDULES for change in schedule.changes]
    assert {change for change in CHANGES if changes.count(change) < 2} == set()


def test_half_of_the_schedules_keep_their_world_size_and_both_halves_cover_all_layouts() -> None:
    kept = [schedule for schedule in SCHEDULES if not schedule.changes]
    changed = [schedule for schedule in SCHEDULES if schedule.changes]
    assert len(kept) == len(changed) == len(SEEDS) // 2
    for half in (kept, changed):
        assert {schedule.world_size for schedule in half} == set(WORLD_SIZES)
        assert {schedule.zero_stage for schedule in half} == set(ZERO_STAGES)
    layouts = {(schedule.world_size, schedule.zero_stage) for schedule in SCHEDULES}
    assert layouts == set(product(WORLD_SIZES, ZERO_STAGES))


@pytest.mark.parametrize(
    ("data", "seeds"),
    [
        (Data.MIXTURE, range(FIRST_MIXTURE_SEED, 61)),
        (Data.PAIRS, range(FIRST_PAIRS_SEED, 71)),
        (Data.LABELS, range(FIRST_LABELS_SEED, 81)),
    ],
)
def test_each_kind_of_data_has_each_kill_and_both_kinds_of_schedules(data: Data, seeds: range) -> None:
    schedules = [schedule for schedule in SCHEDULES if schedule.data is data]
    assert [schedule.seed for schedule in schedules] == list(seeds)
    assert {each.kind for schedule in schedules for each in schedule.faults} >= set(KILLS)
    assert {bool(schedule.changes) for schedule in schedules} == {True, False}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"seed {schedule.seed}")
def test_schedule_can_run(schedule: Schedule) -> None:
    faults = schedule.faults
    steps = [each.after_step for each in faults if each.point in (InjectionPoint.STEP, InjectionPoint.SAVE)]
    assert all(later - earlier > COMPARED_STEPS for earlier, later in pairwise(steps))
    assert max(steps, default=0) < STEPS - 2 * COMPARED_STEPS
    assert [each.point for each in faults[:-1]].count(InjectionPoint.EXPORT) == 0, "nothing comes after the export"
    assert len(faults) in (3, 4)
    size = schedule.world_size
    for before, each in pairwise((None, *faults)):
        assert each is not None
        if each.point is InjectionPoint.RESTORE:
            assert before is not None
            assert before.kind.ends_group, "or nothing starts that could restore"
        if each.world_size != size:
            assert each.point in (InjectionPoint.STEP, InjectionPoint.SAVE)
            assert each.kind is not FaultKind.KILL_SUPERVISOR, "the group goes on as it is"
        size = each.world_size
    lost = [number for number, each in enumerate(faults) if each.kind is FaultKind.LOSE_NODE]
    assert all(faults[number - 1].kind is FaultKind.GROW for number in lost), "or there is no node to be lost"
