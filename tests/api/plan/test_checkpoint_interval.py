"""The checkpoint interval: Young's and Daly's formulas, limits, and the cost of failures."""

import math

import pytest

from spotune.plan.checkpoint_interval import (
    checkpoint_bytes,
    checkpoint_interval_seconds,
    daly_interval_seconds,
    expected_steps_lost,
    lost_fraction,
    mean_seconds_between_failures,
    young_interval_seconds,
)

HOUR = 3600.0


def test_young_interval_is_the_root_of_twice_save_time_and_failure_time() -> None:
    assert young_interval_seconds(save_seconds=2, mean_seconds_between_failures=400) == 40


def test_daly_interval_adds_higher_orders_and_subtracts_the_save_time() -> None:
    # d = 5 min, M = 24 h: 7200 s by Young, times 1 + sqrt(d/2M)/3 + (d/2M)/9.
    factor = 1 + math.sqrt(300 / 172_800) / 3 + 300 / 172_800 / 9

    assert daly_interval_seconds(300, 24 * HOUR) == pytest.approx(7200 * factor - 300)


def test_daly_interval_is_the_failure_time_if_saving_takes_twice_as_long() -> None:
    assert daly_interval_seconds(save_seconds=200, mean_seconds_between_failures=100) == 100


@pytest.mark.parametrize("save", [1.0, 60.0, 600.0])
def test_daly_interval_wastes_less_than_intervals_around_it(save: float) -> None:
    def seconds_per_second_of_work(interval: float) -> float:
        # Daly 2006, equation 20 without restarts: M (exp((t + d) / M) - 1) / t.
        return HOUR * math.expm1((interval + save) / HOUR) / interval

    best = daly_interval_seconds(save, HOUR)

    around = min(seconds_per_second_of_work(0.8 * best), seconds_per_second_of_work(1.25 * best))
    assert seconds_per_second_of_work(best) < around


@pytest.mark.parametrize(("save", "between"), [(0, 100), (1, 0), (-1, 100)])
def test_times_that_are_not_positive_are_refused(save: float, between: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        daly_interval_seconds(save, between)
    with pytest.raises(ValueError, match="must be positive"):
        young_interval_seconds(save, between)


@pytest.mark.parametrize(
    ("save", "between", "interval"),
    [
        (0.001, 60, 30),  # far below the lower limit
        (60, 30 * 24 * HOUR, 1800),  # far above the upper one
        (120, 30, 120),  # saving takes longer than the best interval: at least half of the time is training
    ],
)
def test_interval_stays_within_its_limits(save: float, between: float, interval: float) -> None:
    assert checkpoint_interval_seconds(save, between) == interval


def test_interval_within_the_limits_is_dalys() -> None:
    assert checkpoint_interval_seconds(5, HOUR) == daly_interval_seconds(5, HOUR)


def test_limits_can_be_changed() -> None:
    assert checkpoint_interval_seconds(0.001, 60, minimum_seconds=0.1) == daly_interval_seconds(0.001, 60)


def test_checkpoint_holds_master_weights_and_two_moments() -> None:
    assert checkpoint_bytes(103_000_000) == 1_236_000_000


def test_failures_of_many_workers_come_more_often() -> None:
    assert mean_seconds_between_failures(6 * HOUR, world_size=8) == 0.75 * HOUR


def test_half_an_interval_is_lost_on_average() -> None:
    assert expected_steps_lost(interval_seconds=300, step_seconds=2) == 75


def test_lost_fraction_counts_saving_repeating_and_restarting() -> None:
    fraction = lost_fraction(90, save_seconds=10, mean_seconds_between_failures=1000, restart_seconds=55)

    assert fraction == pytest.approx(10 / 100 + (45 + 55) / 1000)


def test_no_more_than_all_of_the_time_is_lost() -> None:
    assert lost_fraction(1800, 600, mean_seconds_between_failures=60) == 1
