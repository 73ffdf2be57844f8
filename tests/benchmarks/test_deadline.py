"""docs/deadline.md is that of the committed results, and the optimum is one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

import pytest

from benchmarks import deadline_page
from benchmarks.deadline import SLACKS, SWITCHING, cases
from benchmarks.deadline_baselines import Greedy, UniformProgress, on_demand_only, optimum
from spotune.deadline.policy import decide
from spotune.deadline.simulation import ON_DEMAND, WAITING, PoolTrace, Strategy, simulate
from spotune.deadline.terms import Choice, Decision, JobState, Outlook, Switching

RESULTS = deadline_page.read_results()
INTERVAL = 60.0


def test_page_and_plot_are_those_of_what_was_measured() -> None:
    stale = [path.name for path, content in deadline_page.files().items() if path.read_text() != content]
    assert stale == [], "run `make manifests`"


def test_every_policy_met_every_deadline_in_the_committed_results() -> None:
    for found in RESULTS["heldOut"].values():
        for name in deadline_page.POLICIES:
            assert found[name]["met"] == deadline_page.runs(RESULTS, name), name
        assert all(found[name]["overOptimum"] >= 1 for name in deadline_page.POLICIES)


def test_held_out_windows_share_no_time_with_those_for_tuning() -> None:
    intervals = 20_000
    for slack in SLACKS:
        used = [
            {
                at
                for case in cases(intervals, slack, 200, held_out=held_out)
                for at in (case.begin, case.begin + case.deadline)
            }
            for held_out in (True, False)
        ]
        parts = [{at // 2000 for at in times} for times in used]
        assert parts[0] <= {0, 2, 4, 6, 8}
        assert parts[1] <= {1, 3, 5, 7, 9}


def a_trace(seed: int, intervals: int = 60) -> PoolTrace:
    """Two markets that come and go."""
    random = Random(seed)
    rows, state = [], [True, False]
    for _ in range(intervals):
        state = [(not up if random.random() < 0.25 else up) for up in state]
        rows.append(tuple(state))
    return PoolTrace.observed(("a", "b"), (1.0, 1.3), 3.0, INTERVAL, rows, 3600.0)


def _follow(plan: tuple[str, ...]) -> Strategy:
    steps = iter(plan)

    def strategy(state: JobState) -> Decision:
        place = next(steps)
        if place == ON_DEMAND:
            return Decision(Choice.ON_DEMAND, "", Outlook.IN_TIME, "")
        available = any(market.name == place and market.available for market in state.markets)
        return Decision(Choice.SPOT if available else Choice.WAIT, place if available else "", Outlook.IN_TIME, "")

    return strategy


@pytest.mark.parametrize("seed", range(4))
def test_optimum_is_the_cheapest_of_all_plans(seed: int) -> None:
    """Every plan for six intervals is simulated."""
    trace, switching = a_trace(seed), Switching(INTERVAL, INTERVAL, INTERVAL)
    work, deadline = 3, 6
    costs = []
    for plan in product(("a", "b", ON_DEMAND, WAITING), repeat=deadline):
        run = simulate(trace, 5, work * INTERVAL, deadline * INTERVAL, switching, _follow(plan + (ON_DEMAND,) * 9))
        if run.met:
            costs.append(run.cost)
    assert optimum(trace, 5, work, deadline, switching) == pytest.approx(min(costs))


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_is_cheaper_than_the_optimum_or_late(seed: int) -> None:
    trace = a_trace(seed, 400)
    switching = replace(SWITCHING, spot_start=2 * INTERVAL, on_demand_start=3 * INTERVAL, interval=INTERVAL)
    work, deadline = 60, 90
    best = optimum(trace, 10, work, deadline, switching)
    policies: tuple[Strategy, ...] = (
        partial(decide, switching=switching),
        Greedy(switching),
        on_demand_only,
    )
    for policy in policies:
        run = simulate(trace, 10, work * INTERVAL, deadline * INTERVAL, switching, policy)
        assert run.met
        assert run.cost >= best - 1e-9
    alone = trace.only(["a"])
    paper = UniformProgress(switching, work * INTERVAL, deadline * INTERVAL)
    assert simulate(alone, 10, work * INTERVAL, deadline * INTERVAL, switching, paper).met
