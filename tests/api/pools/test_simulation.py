"""A job in simulated pools: it agrees with the simulation of one market, moves, and pays for what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune.pools.simulation import PoolsRun, PoolSupply, simulate_pools
from spotune.pools.terms import Pool, Wish
from spotune.simulate.simulation import simulate
from spotune.simulate.terms import Scenario, Timings
from spotune.simulate.trace import Trace, read_trace

HOUR = 3600.0
TIMES = Timings(step={4: 1.0}, join=60.0)
WISH = Wish(4, 2, cooldown=600.0)
RECORDED = read_trace(Path(__file__).parents[3] / "examples/traces/v100-4.csv")


def supply(name: str, *changes: tuple[float, int], price: float = 1.0, hours: float = 10.0) -> PoolSupply:
    return PoolSupply(Pool(name, 4, 600.0), Trace(changes, hours * HOUR), price)


def run(*supplies: PoolSupply, steps: int | None = None) -> PoolsRun:
    return simulate_pools(supplies, WISH, TIMES, steps=steps)


def test_one_pool_is_what_the_simulation_of_one_market_says() -> None:
    times = Timings(step={4: 2.5}, join=60.0)
    found = simulate_pools([PoolSupply(Pool("a", 4, 600.0), RECORDED)], WISH, times, steps=100_000)
    expected = simulate(RECORDED, Scenario(4, 2), times, 100_000, 0)
    assert found.finished
    assert found.seconds == pytest.approx(expected.seconds, rel=0.02)
    assert found.used["a"].node_seconds == pytest.approx(expected.spot_seconds, rel=0.02)
    assert found.groups - 1 == pytest.approx(expected.restarts, rel=0.1)


def test_a_job_goes_on_in_another_pool_and_moves_back_without_a_lost_step() -> None:
    cheap = supply("cheap", (0.0, 4), (2 * HOUR, 0), (5 * HOUR, 4))
    found = run(cheap, supply("dear", (0.0, 4), price=3.0))
    lost = run(supply("cheap", (0.0, 4), (2 * HOUR, 0))).steps_lost
    assert found.steps_lost == lost, "only the loss undid steps, not the move back"
    assert (found.moves, found.used["cheap"].losses) == (1, 4)
    assert found.used["cheap"].all_seconds == 7 * HOUR
    dear = found.used["dear"].node_seconds / 4 / HOUR
    assert 2.8 < dear < 4, "from the refusal on, until a probe found the cheap pool, an hour late at most"
    held = found.used["cheap"].node_seconds / HOUR
    assert found.cost([cheap, supply("dear", (0.0, 4), price=3.0)]) == pytest.approx(held + 3 * 4 * dear)
    assert found.staffed / found.seconds > 0.96


def test_a_loss_undoes_what_was_not_committed() -> None:
    pools = [supply("a", (0.0, 4), (3 * HOUR + 31, 0), (3 * HOUR + 60, 4))]
    found = simulate_pools(pools, WISH, TIMES, checkpoint_every=300.0)
    assert 0 < found.steps_lost <= 300 + TIMES.commit
    every_step = simulate_pools(pools, WISH, TIMES, checkpoint_every=60)
    assert every_step.steps_lost < found.steps_lost
    assert found.productive == pytest.approx(found.steps * 1.0)


def test_kinds_of_gpus_do_not_train_together() -> None:
    old = PoolSupply(Pool("old", 4, 600.0, "v100"), Trace(((0.0, 3),), 10 * HOUR), 1.0)
    new = PoolSupply(Pool("new", 4, 600.0, "l4"), Trace(((0.0, 0), (HOUR, 4)), 10 * HOUR), 2.0)
    found = run(old, new)
    assert found.used["new"].node_seconds > 4 * 8 * HOUR, "the whole group of the other kind took over"
    assert found.used["old"].node_seconds < 3 * 2.5 * HOUR


def test_a_job_that_never_gets_its_minimum_does_not_finish() -> None:
    found = run(supply("a", (0.0, 1)), steps=10)
    assert (found.finished, found.steps, found.staffed) == (False, 0, 0)
    assert found.used["a"].node_seconds > 0
