"""The policy keeps every deadline that on-demand nodes can keep, and spends slack where the history says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spotune.deadline.policy import decide
from spotune.deadline.simulation import PoolTrace, simulate
from spotune.deadline.terms import Choice, JobState, Market, Outlook, Switching, work_seconds

HOUR = 3600.0
SWITCHING = Switching(spot_start=300, on_demand_start=600, interval=60)
STEADY = Market("steady", price=1.0, available=True, expected_lifetime=20 * HOUR)
SHORT = Market("short", price=1.0, available=True, expected_lifetime=HOUR)
GONE = replace(STEADY, name="gone", available=False)
STATE = JobState(work=10 * HOUR, to_deadline=15 * HOUR, markets=(STEADY, SHORT), on_demand_price=3.0)


@settings(deadline=None, max_examples=300)
@given(
    available=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=120),
    prices=st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)),
    starts=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    at_risk=st.integers(0, 3),
    work=st.integers(1, 60),
    extra=st.integers(0, 40),
)
@example([(False, False)], (1.0, 1.0), (0, 3), 0, 60, 0)
def test_every_deadline_is_met_that_on_demand_nodes_could_meet(
    available: list[tuple[bool, bool]],
    prices: tuple[float, float],
    starts: tuple[int, int],
    at_risk: int,
    work: int,
    extra: int,
) -> None:
    """Whatever the markets do: with time for a start on demand and the work at the begin, the deadline holds.

    A loss undoes up to `at_risk` of training.
    """
    spot, on_demand = starts
    rows = (available * 200)[: 2 * (work + extra) + 50]
    trace = PoolTrace.observed(("a", "b"), prices, 2.0, 60.0, rows, 3600.0)
    switching = Switching(60.0 * spot, 60.0 * on_demand, 60.0, 60.0 * at_risk)
    deadline = 60.0 * (work + on_demand + extra)
    run = simulate(trace, 0, 60.0 * work, deadline, switching, partial(decide, switching=switching))
    assert run.met


def test_work_that_a_loss_undoes_is_within_the_safety_net() -> None:
    switching = replace(SWITCHING, at_risk=900)
    state = replace(STATE, markets=(STEADY,), holds="steady")
    enough = 10 * HOUR + 600 + 60 + 900
    assert decide(replace(state, to_deadline=enough), switching).choice is Choice.SPOT
    assert decide(replace(state, to_deadline=enough - 1), switching).choice is Choice.ON_DEMAND


def test_market_is_chosen_whose_nodes_stay() -> None:
    decision = decide(STATE, SWITCHING)
    assert (decision.choice, decision.market) == (Choice.SPOT, "steady")
    assert decision.reason == "steady has spot nodes, and 5 h 00 min of slack are left"


def test_cheaper_market_is_taken_only_if_it_pays_for_the_start() -> None:
    held = replace(STATE, markets=(replace(SHORT, price=0.5), STEADY), holds="steady")
    assert decide(held, SWITCHING).market == "short"
    assert decide(replace(held, work=300.0, to_deadline=5 * HOUR), SWITCHING).market == "steady"
    dear = replace(held, markets=(replace(SHORT, price=0.99), STEADY))
    assert decide(dear, SWITCHING).market == "steady"


def test_job_waits_for_its_share_of_the_slack_and_then_pays() -> None:
    outage = replace(STATE, markets=(GONE,))
    waiting = decide(replace(outage, waited=1 * HOUR, to_deadline=14 * HOUR), SWITCHING)
    assert (waiting.choice, waiting.outlook) == (Choice.WAIT, Outlook.IN_TIME)
    often_lost = replace(outage, markets=(replace(GONE, expected_lifetime=HOUR),))
    paid = decide(replace(often_lost, waited=1 * HOUR, to_deadline=14 * HOUR), SWITCHING)
    assert paid.choice is Choice.ON_DEMAND
    assert paid.reason == "no spot nodes for 1 h 00 min; 4 h 00 min of slack are kept"


def test_on_demand_nodes_are_left_for_nodes_that_stay() -> None:
    paying = replace(STATE, on_demand=True, markets=(STEADY,))
    assert decide(paying, SWITCHING).market == "steady"
    brief = replace(paying, markets=(replace(STEADY, expected_lifetime=900.0),))
    assert decide(brief, SWITCHING).choice is Choice.ON_DEMAND
    no_slack = replace(paying, to_deadline=10 * HOUR + 900)
    assert decide(no_slack, SWITCHING).choice is Choice.ON_DEMAND


@pytest.mark.parametrize(
    ("to_deadline", "on_demand", "outlook", "reason"),
    [
        (10 * HOUR + 600, False, Outlook.NO_SLACK, "10 min 00 s of slack are too little for spot nodes"),
        (10 * HOUR + 540, False, Outlook.LATE, "even on-demand nodes are 1 min 00 s late"),
        (10 * HOUR, True, Outlook.NO_SLACK, "0 s of slack are too little for spot nodes"),
        (10 * HOUR - 60, True, Outlook.LATE, "even on-demand nodes are 1 min 00 s late"),
    ],
)
def test_deadline_that_is_at_risk_is_said(to_deadline: float, on_demand: bool, outlook: Outlook, reason: str) -> None:
    decision = decide(replace(STATE, to_deadline=to_deadline, on_demand=on_demand), SWITCHING)
    assert (decision.choice, decision.outlook) == (Choice.ON_DEMAND, outlook)
    assert decision.reason.startswith(reason)


def test_finished_job_holds_nothing() -> None:
    assert decide(replace(STATE, work=0.0, on_demand=True), SWITCHING).choice is Choice.DONE


def test_work_left_follows_from_the_measured_speed() -> None:
    assert work_seconds(100, {4: 2.0}, 8) == 100.0
