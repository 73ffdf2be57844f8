"""The simulation of a job on a spot trace: examples computed by hand, and invariants."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotune.goodput import Part
from spotune.simulate.compare import Prices, ScenarioResult, all_scenarios, compare
from spotune.simulate.measured import timings_from_ledger
from spotune.simulate.simulation import simulate
from spotune.simulate.supply import NodeSupply, supply
from spotune.simulate.terms import NEVER, Scenario, SimulationResult, Timings
from spotune.simulate.trace import Trace

TIMES = Timings(
    step={4: 1.0},
    start_up=20.0,
    restore=5.0,
    stall=0.5,
    commit=4.0,
    detection=2.0,
    attempt=10.0,
    head_loss=30.0,
    patience=30.0,
)
CALM = Trace(((0.0, 4),), 1000.0)
CHOICE = Scenario(workers=4, min_workers=4, checkpoint_every=100, resize_cooldown=NEVER)


def spent(outcome: SimulationResult) -> dict[str, float]:
    """Seconds of all parts that are not zero."""
    return {str(part): round(seconds, 6) for part, seconds in outcome.spent.items() if seconds}


def held(trace: Trace, **values: Any) -> list[NodeSupply]:
    """The nodes of a job with four workers during the first pass over the trace."""
    chosen = {"workers": 4, "capacity": "spot", "head": "on-demand", "on_demand_after": 60.0, "random": Random(0)}
    moments = []
    for moment in supply(trace, **{**chosen, **values}):
        if moment.seconds >= trace.seconds:
            break
        moments.append(moment)
    return moments


def test_a_run_without_failures() -> None:
    """250 steps with commits after 100 and 200; the run waits for the last one."""
    outcome = simulate(CALM, CHOICE, TIMES, steps=250)
    assert spent(outcome) == {"productive": 250.0, "checkpointStall": 0.5 + 0.5 + 4.0, "startup": 30.0}
    assert (outcome.steps, outcome.steps_lost, outcome.restarts, outcome.finished) == (250, 0, 0, True)
    assert outcome.spot_seconds == 4 * outcome.seconds


def test_a_lost_worker_rolls_back_to_the_last_commit() -> None:
    """Training starts at 30 s. The commit after step 100 starts at 130 s and is durable at 134 s.

    By 200 s it has completed 69 and a half more steps.
    """
    trace = Trace(((0.0, 4), (200.0, 3), (210.0, 4)), 1000.0)
    outcome = simulate(trace, CHOICE, TIMES, steps=250)
    lost = 69.5 + 2.0
    waiting = 210.0 - 202.0
    expected = {"productive": 250.0, "lost": lost, "waiting": waiting, "startup": 50.0, "restore": 5.0}
    assert spent(outcome) == {**expected, "checkpointStall": 0.5 + 0.5 + 4.0}
    assert (outcome.steps_lost, outcome.restarts) == (69, 1)


def test_a_commit_that_is_not_durable_yet_is_lost_with_its_worker() -> None:
    trace = Trace(((0.0, 4), (133.0, 3), (140.0, 4)), 1000.0)
    outcome = simulate(trace, CHOICE, TIMES, steps=250)
    assert outcome.steps_lost == 102
    assert Part.RESTORE not in spent(outcome)


def test_group_that_leaves_within_its_notice_loses_no_step() -> None:
    """The notice comes at 170 s. No replacement has come yet, so the group leaves 11 s before the deadline.

    That is 1.5 times the commit of 4 s, 3 s, and two steps. The commit is durable at 193 s.
    """
    trace = Trace(((0.0, 4), (200.0, 3), (210.0, 4)), 1000.0)
    warned = simulate(trace, replace(CHOICE, notice=30.0), TIMES, steps=250)
    stalled = 0.5 + 0.5 + 4.0 + 0.5 + 4.0
    """After step 100, at the notice, to leave, after step 200, and the last."""
    expected = {"productive": 250.0, "waiting": 210.0 - 193.0, "startup": 50.0, "restore": 5.0}
    assert spent(warned) == {**expected, "checkpointStall": stalled}
    assert (warned.steps_lost, warned.restarts) == (0, 1)
    assert warned.seconds < simulate(trace, CHOICE, TIMES, steps=250).seconds


def test_notice_that_is_too_short_for_a_commit_saves_nothing() -> None:
    trace = Trace(((0.0, 4), (200.0, 3), (210.0, 4)), 1000.0)
    assert simulate(trace, replace(CHOICE, notice=3.0), TIMES, steps=250).steps_lost > 60


def test_measured_replacements_decide_how_long_the_next_group_waits() -> None:
    """A node is lost three times, and replaced after 80 s. At the first loss the driver waits for 30 s."""
    points = [point for at in (300.0, 1500.0, 2700.0) for point in ((at, 3), (at + 80.0, 4))]
    trace = Trace(((0.0, 4), *points), 4000.0)
    scenario = replace(CHOICE, min_workers=2, resize_cooldown=600.0, notice=30.0)
    outcome = simulate(trace, scenario, TIMES)
    assert outcome.steps_lost == 0
    assert outcome.restarts == 4, "the first replacement comes to a smaller group, which is resized; the others do not"
    assert 30 + 2 * 80 < outcome.spent[Part.WAITING] < 30 + 2 * 100


def test_next_group_waits_for_as_many_workers_as_the_last_one_had_and_no_more() -> None:
    """Three of four nodes are there. One is lost and replaced after 80 s, twice; the second time that is expected."""
    trace = Trace(((0.0, 3), (300.0, 2), (380.0, 3), (1500.0, 2), (1580.0, 3)), 2500.0)
    scenario = replace(CHOICE, min_workers=2, resize_cooldown=600.0, notice=30.0)
    waiting = simulate(trace, scenario, TIMES).spent[Part.WAITING]
    left = 1500 - (1.5 * 4 + 3 + 2 * 4 / 3) + 4
    assert waiting == pytest.approx(30 + 30 + (1580 - left), abs=3)


def test_next_group_starts_without_a_node_whose_loss_is_announced_meanwhile() -> None:
    """The second notice comes before the group leaves for the first. So the next group outlives the second loss."""
    trace = Trace(((0.0, 4), (300.0, 3), (400.0, 2)), 1000.0)
    outcome = simulate(trace, replace(CHOICE, min_workers=2, notice=120.0), TIMES)
    assert (outcome.steps_lost, outcome.restarts) == (0, 1)
    assert simulate(trace, replace(CHOICE, min_workers=2, notice=60.0), TIMES).restarts == 2


def test_group_grows_once_a_new_node_can_train() -> None:
    trace = Trace(((0.0, 3), (300.0, 4)), 1000.0)
    scenario = replace(CHOICE, min_workers=2, resize_cooldown=0.0)

    def spot_steps(join: float) -> int:
        return simulate(trace, scenario, replace(TIMES, step={3: 4.0, 4: 1.0}, join=join)).steps

    assert spot_steps(join=0.0) - spot_steps(join=60.0) == pytest.approx(60 / 1.0 - 60 / 4.0, abs=4)


def test_driver_without_patience_waits_for_a_node_that_has_joined() -> None:
    """After the second notice the driver would not wait. But the replacement of the first node has just joined."""
    trace = Trace(((0.0, 4), (200.0, 3), (205.0, 4)), 600.0)
    scenario = replace(CHOICE, min_workers=2, notice=30.0)
    assert simulate(trace, scenario, replace(TIMES, patience=5.0, join=20.0)).restarts == 1


def test_first_group_of_a_driver_starts_more_slowly() -> None:
    trace = Trace(((0.0, 4), (200.0, 3), (210.0, 4)), 1000.0)
    plain = simulate(trace, CHOICE, TIMES, steps=250)
    slow = simulate(trace, CHOICE, replace(TIMES, first_start_up=50.0), steps=250)
    assert slow.spent[Part.STARTUP] - plain.spent[Part.STARTUP] == 30.0, "once, not at the second start"


def test_postponed_resize_waits_for_one_more_node() -> None:
    """The first loss shows how long replacements take. Of two nodes lost later, one comes 30 s after the other."""
    later = [(1500.0, 2), (1570.0, 3), (1600.0, 4)]
    scenario = replace(CHOICE, min_workers=2, resize_cooldown=0.0, checkpoint_every=50)

    def restarts(replaced_after: float) -> int:
        points = ((0.0, 4), (300.0, 3), (300.0 + replaced_after, 4), *later)
        return simulate(Trace(points, 4000.0), scenario, TIMES).restarts

    assert restarts(replaced_after=100.0) == 2 + 2, "a smaller group and a resize after each loss"
    assert restarts(replaced_after=1000.0) == 2 + 3, "the second node was not expected so soon"


def test_training_starts_with_fewer_workers_after_a_wait() -> None:
    trace = Trace(((0.0, 2), (900.0, 4)), 1000.0)
    outcome = simulate(trace, replace(CHOICE, min_workers=2), TIMES, steps=50)
    assert spent(outcome) == {"productive": 100.0, "checkpointStall": 4.0, "startup": 30.0, "waiting": 30.0}
    assert simulate(trace, CHOICE, TIMES).spent[Part.WAITING] == 890.0


def test_a_group_is_resized_after_its_cooldown_with_a_commit() -> None:
    trace = Trace(((0.0, 2), (100.0, 4)), 2000.0)
    scenario = replace(CHOICE, min_workers=2, resize_cooldown=300.0, checkpoint_every=10_000)
    outcome = simulate(trace, scenario, TIMES, steps=500)
    assert (outcome.restarts, outcome.steps_lost) == (1, 0)
    assert outcome.spent[Part.RESTORE] == 5.0
    assert outcome.seconds < simulate(trace, replace(scenario, resize_cooldown=NEVER), TIMES, steps=500).seconds


def test_short_lived_nodes_do_not_resize_a_group() -> None:
    visits = [point for at in range(400, 1900, 20) for point in ((float(at), 4), (at + 9.0, 2))]
    scenario = replace(CHOICE, min_workers=2, resize_cooldown=0.0, checkpoint_every=10_000)
    for steady, restarts in ((10.0, 0), (8.0, 1)):
        trace = Trace(((0.0, 2), *visits, (1999.0, 0)), 2000.0)  # the group is done before all nodes are lost
        outcome = simulate(trace, scenario, replace(TIMES, steady=steady), steps=500)
        assert min(outcome.restarts, 1) == restarts


def test_losses_without_a_new_step_increase_the_backoff() -> None:
    """Nodes are lost before the start-up is finished."""
    flapping = [(seconds, nodes) for begin in range(0, 200, 20) for seconds, nodes in ((begin, 4), (begin + 19.0, 3))]
    outcome = simulate(Trace(tuple(flapping), 200.0), CHOICE, replace(TIMES, attempt=0.0))
    assert outcome.steps == 0
    assert outcome.spent[Part.WAITING] > 5 + 10 + 20


def test_on_demand_workers_are_never_lost() -> None:
    trace = Trace(((0.0, 0),), 1000.0)
    (row,) = compare(trace, [replace(CHOICE, capacity="on-demand")], TIMES, Prices(on_demand=3.6), 100, 5)
    assert row.finished
    assert row.cost == pytest.approx(4 * row.seconds * 3.6 / 3600)
    assert compare(CALM, [CHOICE], TIMES, Prices(on_demand=3.6), 100, 5)[0].cost is None, "the price of spot is missing"


def test_on_demand_nodes_replace_missing_spot_nodes_temporarily() -> None:
    trace = Trace(((0.0, 4), (100.0, 1), (130.0, 2), (300.0, 4)), 400.0)
    assert held(trace, capacity="spot-then-on-demand") == [
        NodeSupply(0.0, 4, 0),
        NodeSupply(100.0, 1, 0, lost=3),
        NodeSupply(130.0, 2, 0),
        NodeSupply(160.0, 2, 1),
        NodeSupply(160.0, 2, 2),
        NodeSupply(300.0, 4, 0, lost=2),
    ]


def test_a_spot_head_gets_a_node_before_workers_and_may_be_lost() -> None:
    trace = Trace(((0.0, 5), (100.0, 0), (200.0, 3)), 400.0)
    assert held(trace, head="spot") == [
        NodeSupply(0.0, 4, 0, head=True),
        NodeSupply(100.0, 0, 0, lost=4, head=False, head_lost=True),
        NodeSupply(200.0, 2, 0, head=True),
    ]


def test_the_loss_of_a_head_takes_longer_than_that_of_a_worker() -> None:
    trace = Trace(((0.0, 5), (200.0, 0), (210.0, 5)), 1000.0)
    spot = simulate(trace, replace(CHOICE, head="spot"), TIMES, steps=250)
    on_demand = simulate(trace, CHOICE, TIMES, steps=250)
    assert spot.seconds - on_demand.seconds == pytest.approx(30.0 + 10.0 - 10.0), "its own loss and start, but no wait"


def test_unmeasured_step_times_scale_inversely_with_workers() -> None:
    times = Timings(step={2: 3.0, 8: 1.0})
    assert [times.step_seconds(workers) for workers in (1, 2, 4, 8, 16)] == [6.0, 3.0, 1.5, 1.0, 0.5]


def test_scenarios_are_all_combinations() -> None:
    found = all_scenarios(CHOICE, workers=[2, 4], checkpoint_every=["auto", 60.0])
    assert [(scenario.workers, scenario.checkpoint_every) for scenario in found] == [
        (2, "auto"),
        (2, 60.0),
        (4, "auto"),
        (4, 60.0),
    ]


changes = st.lists(st.tuples(st.floats(1, 500), st.integers(0, 6)), min_size=1, max_size=15)
scenarios = st.builds(
    Scenario,
    workers=st.integers(2, 4),
    min_workers=st.integers(1, 2),
    checkpoint_every=st.sampled_from(["auto", 45.0, 7]),
    head=st.sampled_from(["spot", "on-demand"]),
    capacity=st.sampled_from(["spot", "on-demand", "spot-then-on-demand"]),
    on_demand_after=st.floats(0, 300),
    resize_cooldown=st.sampled_from([NEVER, 0.0, 100.0]),
    notice=st.sampled_from([0.0, 10.0, 120.0]),
)


def trace_of(lengths: list[tuple[float, int]]) -> Trace:
    now, points = 0.0, []
    for length, nodes in lengths:
        points.append((now, nodes))
        now += length
    return Trace(tuple(points), now)


@settings(max_examples=200, deadline=None)
@given(changes, scenarios, st.integers(0, 5))
def test_the_parts_sum_to_the_length_of_the_trace(
    lengths: list[tuple[float, int]], scenario: Scenario, seed: int
) -> None:
    trace = trace_of(lengths)
    outcome = simulate(trace, scenario, TIMES, seed=seed)
    assert outcome.seconds == pytest.approx(trace.seconds)
    assert min(outcome.spent.values()) >= -1e-6
    assert outcome.steps >= 0
    nodes = outcome.spot_seconds + outcome.on_demand_seconds
    assert nodes <= scenario.workers * trace.seconds * (1 + 1e-9)
    if scenario.capacity == "on-demand":
        assert outcome.spot_seconds == 0


@settings(max_examples=100, deadline=None)
@given(changes, scenarios, st.integers(1, 200))
def test_a_finished_job_has_spent_the_time_of_its_steps(
    lengths: list[tuple[float, int]], scenario: Scenario, steps: int
) -> None:
    trace = trace_of([*lengths, (2000.0, 6)])
    outcome = simulate(trace, scenario, TIMES, steps)
    assert outcome.finished
    assert outcome.steps == steps
    slowest, fastest = TIMES.step_seconds(scenario.min_workers), TIMES.step_seconds(scenario.workers)
    assert fastest * steps <= outcome.spent[Part.PRODUCTIVE] + 1e-6 <= slowest * steps + 1e-5


def test_as_json_contains_scenario_and_result() -> None:
    row = ScenarioResult(CHOICE, [simulate(CALM, CHOICE, TIMES, steps=250)], Prices(spot=0.9), 250)
    found = row.as_json()
    assert found.items() >= {"workers": 4, "checkpointEvery": 100, "head": "on-demand", "finished": True}.items()
    assert found["goodput"] == round(250 / 285, 4)
    assert sum(found["parts"].values()) == pytest.approx(found["wallSeconds"])
    assert found["cost"] == pytest.approx(4 * 285 * 0.9 / 3600, abs=1e-4)


def test_timings_of_a_run_come_from_its_ledger() -> None:
    def ended(generation: int, workers: int, steps: int, **parts: float) -> dict[str, Any]:
        common = {"event": "generation-ended", "time": 0.0, "generation": generation, "worldSize": workers}
        return {**common, "steps": steps, "seconds": sum(parts.values()), "parts": parts}

    def started(generation: int, at: float, restored: str | None) -> dict[str, Any]:
        common = {"event": "generation-started", "generation": generation, "time": at, "planSeconds": 1.0}
        return {**common, "restoredFrom": restored}

    records = [
        {"event": "attempt-started", "time": 100.0},
        started(1, 108.0, None),
        {"event": "committed", "time": 130.0, "seconds": 3.0, "stallSeconds": 0.25},
        ended(1, 2, 40, productive=80.0, dataWait=4.0, startup=20.0, lost=2.5),
        started(2, 230.0, "step-00000030.gen-1"),
        {"event": "committed", "time": 240.0, "seconds": 5.0, "stallSeconds": 0.75},
        {"event": "attempt-ended", "time": 300.0, "exitCode": None, "lastSeen": 260.0},
        {"event": "attempt-started", "time": 310.0},
        {"event": "waiting", "time": 313.0},
        {"event": "replaced", "time": 318.0, "seconds": 50.0, "startSeconds": 6.0},
        ended(2, 1, 10, productive=40.0, dataWait=1.0, startup=22.0, restore=3.0),
    ]
    found = timings_from_ledger(records, TIMES)
    assert found.step == {1: 4.0, 2: 2.0}
    assert (found.data_wait, found.restore, found.join) == (0.1, 3.0, 6.0)
    assert (found.first_start_up, found.start_up) == (21.0, 23.0)
    assert (found.stall, found.commit, found.detection) == (0.5, 4.0, 1.5)
    assert (found.attempt, found.head_loss, found.patience) == (5.0, 50.0, TIMES.patience)
    assert timings_from_ledger([], TIMES) == TIMES
    without_new_nodes = [record for record in records if record["event"] != "replaced"]
    assert timings_from_ledger(without_new_nodes, TIMES).join == found.first_start_up
