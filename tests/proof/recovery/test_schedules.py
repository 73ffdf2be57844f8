"""The recovery schedules contain what the proof is about, often, and each can run."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.proof.recovery.schedules import (
    FIRST_SEED,
    LAST_SEED,
    RECOVERY_MOMENTS,
    STEPS,
    Moment,
    RecoverySchedule,
    Target,
    Theme,
    make_schedule,
    theme_of,
)

SEEDS = range(FIRST_SEED, LAST_SEED + 1)
SCHEDULES = [make_schedule(seed) for seed in SEEDS]
BY_PHASE = [moment for moment in RECOVERY_MOMENTS if moment is not Moment.PEER_READ]
PEER_MOMENTS = {Moment.COPY, Moment.COPIED, Moment.PEER_READ}


def test_schedule_is_a_function_of_its_seed() -> None:
    assert [make_schedule(seed) for seed in SEEDS] == SCHEDULES
    assert len({(schedule.nodes, schedule.rounds) for schedule in SCHEDULES}) == len(SEEDS) == 200


def test_every_theme_has_a_quarter_of_the_schedules() -> None:
    assert Counter(theme_of(seed) for seed in SEEDS) == dict.fromkeys(Theme, 50)


@pytest.mark.parametrize("moment", BY_PHASE)
@pytest.mark.parametrize("target", [Target.RANK, Target.RANKS, Target.NODE, Target.DRIVER, Target.EVERYTHING])
def test_every_part_is_killed_in_every_phase_of_a_recovery(target: Target, moment: Moment) -> None:
    assert sum(kill.target is target and kill.moment is moment for each in SCHEDULES for kill in each.kills) >= 2


@pytest.mark.parametrize(
    ("targets", "moment", "least"),
    [
        ({Target.SENDER}, Moment.COPY, 10),
        ({Target.RECEIVER}, Moment.COPY, 10),
        ({Target.DRIVER}, Moment.COPY, 10),
        ({Target.SENDER}, Moment.PEER_READ, 10),
        ({Target.READER}, Moment.PEER_READ, 10),
        ({Target.DRIVER}, Moment.PEER_READ, 10),
        ({Target.HOLDERS}, Moment.COPIED, 10),
        ({Target.HOLDERS}, Moment.COPY, 10),
    ],
)
def test_what_concerns_peers_occurs_often(targets: set[Target], moment: Moment, least: int) -> None:
    found = [each for each in SCHEDULES if any(k.target in targets and k.moment is moment for k in each.kills)]
    assert len(found) >= least
    assert {len(schedule.nodes) for schedule in found} >= {2, 3}


def test_some_schedules_resize() -> None:
    resizing = [schedule for schedule in SCHEDULES if schedule.resizes]
    assert 20 <= len(resizing) <= 50
    assert all(len(schedule.nodes) > 1 and schedule.zero_stage < 3 for schedule in resizing)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"seed {schedule.seed}")
def test_schedule_can_run(schedule: RecoverySchedule) -> None:
    for first, *others in schedule.rounds:
        assert not first.moment.is_recovery
        assert 0 < first.after_step < STEPS - 3
        assert others
        assert all(kill.moment.is_recovery for kill in others)
    if len(schedule.nodes) == 1:
        assert {kill.moment for kill in schedule.kills}.isdisjoint(PEER_MOMENTS), "there is no peer"


@pytest.mark.parametrize("workers", [1, 2])
def test_smaller_machine_plays_smaller_schedules(workers: int) -> None:
    schedules = [make_schedule(seed, workers) for seed in SEEDS]
    assert {schedule.world_size for schedule in schedules} == {workers}
    if workers == 1:
        assert {kill.moment for each in schedules for kill in each.kills}.isdisjoint(PEER_MOMENTS)
