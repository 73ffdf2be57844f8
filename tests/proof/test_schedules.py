"""Fifty schedules leave nothing out, and each can be played."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from tests.proof.schedules import (
    CHANGES,
    COMPARED_STEPS,
    KILLS_AND_MOMENTS,
    STEPS,
    WORLD_SIZES,
    ZERO_STAGES,
    Deed,
    Moment,
    Schedule,
    make_schedule,
)

SEEDS = range(1, 51)
SCHEDULES = [make_schedule(seed) for seed in SEEDS]


def test_a_seed_is_a_schedule() -> None:
    assert [make_schedule(seed) for seed in SEEDS] == SCHEDULES
    assert len({(schedule.world_size, schedule.disturbances) for schedule in SCHEDULES}) == len(SEEDS)


def test_everything_is_killed_at_every_moment() -> None:
    found = {(each.deed, each.moment) for schedule in SCHEDULES for each in schedule.disturbances}
    assert set(KILLS_AND_MOMENTS) <= found
    assert {deed for deed, _ in found} == set(Deed)


def test_every_change_of_world_size_is_made_more_than_once() -> None:
    changes = [change for schedule in SCHEDULES for change in schedule.changes]
    assert {change for change in CHANGES if changes.count(change) < 2} == set()


def test_half_of_them_keep_their_world_size_and_every_size_and_stage_is_among_both() -> None:
    kept = [schedule for schedule in SCHEDULES if not schedule.changes]
    changed = [schedule for schedule in SCHEDULES if schedule.changes]
    assert len(kept) == len(changed) == len(SEEDS) // 2
    for half in (kept, changed):
        assert {schedule.world_size for schedule in half} == set(WORLD_SIZES)
        assert {schedule.zero_stage for schedule in half} == set(ZERO_STAGES)
    layouts = {(schedule.world_size, schedule.zero_stage) for schedule in SCHEDULES}
    assert layouts == set(product(WORLD_SIZES, ZERO_STAGES))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"seed {schedule.seed}")
def test_it_can_be_played(schedule: Schedule) -> None:
    disturbances = schedule.disturbances
    steps = [each.after_step for each in disturbances if each.moment in (Moment.STEP, Moment.SAVE)]
    assert all(later - earlier > COMPARED_STEPS for earlier, later in pairwise(steps))
    assert max(steps, default=0) < STEPS - 2 * COMPARED_STEPS
    assert [each.moment for each in disturbances[:-1]].count(Moment.EXPORT) == 0, "nothing comes after the export"
    assert len(disturbances) in (3, 4)
    size = schedule.world_size
    for before, each in pairwise((None, *disturbances)):
        assert each is not None
        if each.moment is Moment.RESTORE:
            assert before is not None
            assert before.deed.ends_group, "or nothing starts that could restore"
        if each.world_size != size:
            assert each.moment in (Moment.STEP, Moment.SAVE)
            assert each.deed is not Deed.KILL_SUPERVISOR, "the group goes on as it is"
        size = each.world_size
    lost = [number for number, each in enumerate(disturbances) if each.deed is Deed.LOSE_NODE]
    assert all(disturbances[number - 1].deed is Deed.GROW for number in lost), "or there is no node to be lost"
