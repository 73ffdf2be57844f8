"""How long replacements take is measured by counting slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spotune.resize.replacements import ReplacementTimes


def observed(*counts: tuple[float, int, int], desired: int = 4) -> ReplacementTimes:
    """Replacements after counts of (time, slots of nodes, of these ready)."""
    replacements = ReplacementTimes()
    for now, nodes, ready in counts:
        replacements.observe(nodes=nodes, ready=ready, desired=desired, now=now)
    return replacements


def test_replacement_takes_from_the_loss_until_the_slot_is_ready() -> None:
    replacements = observed((0, 4, 4), (10, 3, 3), (50, 4, 3), (60, 4, 4))
    assert replacements.seconds == (50,)
    assert replacements.missing() == 0


def test_a_slot_that_comes_restores_the_number_before_the_last_loss() -> None:
    replacements = observed((0, 4, 4), (10, 3, 3), (30, 2, 2), (60, 3, 3), (65, 4, 4))
    assert replacements.seconds == (30, 55)


def test_workers_that_were_missing_from_the_start_are_not_measured() -> None:
    replacements = observed((0, 2, 2), (10, 1, 1), (60, 2, 2), (70, 4, 4))
    assert replacements.seconds == (50,)


def test_workers_that_are_requested_later_are_measured_from_then_on() -> None:
    replacements = observed((0, 4, 4), (10, 3, 3))
    replacements.observe(nodes=3, ready=3, desired=6, now=20)
    for now, ready in ((30, 4), (50, 6)):
        replacements.observe(nodes=ready, ready=ready, desired=6, now=now)
    assert replacements.seconds == (20, 30, 30)


def test_slots_that_exist_before_they_are_requested_are_not_measured() -> None:
    replacements = observed((0, 6, 6))
    replacements.observe(nodes=6, ready=6, desired=6, now=20)
    assert (replacements.missing(), replacements.seconds) == (0, ())


def test_agent_that_is_restarted_on_its_node_is_no_replacement() -> None:
    assert observed((0, 4, 4), (10, 4, 3), (15, 4, 4)).seconds == ()


def test_workers_that_are_no_longer_desired_are_not_measured() -> None:
    replacements = observed((0, 4, 4), (10, 3, 3))
    replacements.observe(nodes=3, ready=3, desired=3, now=20)
    assert (replacements.missing(), replacements.seconds) == (0, ())


def test_each_replacement_is_reported_once() -> None:
    reported: list[tuple[float | None, float | None]] = []
    replacements = ReplacementTimes([70.0], lambda *seconds: reported.append(seconds))
    for now, nodes, ready in ((0, 2, 2), (5, 1, 1), (25, 2, 2), (30, 2, 2), (40, 1, 1), (50, 2, 1), (56, 2, 2)):
        replacements.observe(nodes=nodes, ready=ready, desired=2, now=now)
    assert reported == [(20, None), (16, 6)]
    assert replacements.seconds == (70.0, 20, 16)


def test_start_of_a_node_is_measured_whenever_its_worker_was_lost() -> None:
    reported: list[tuple[float | None, float | None]] = []
    replacements = ReplacementTimes([], lambda *seconds: reported.append(seconds))
    for now, nodes, ready in ((0, 1, 1), (5, 2, 1), (12, 2, 2)):
        replacements.observe(nodes=nodes, ready=ready, desired=2, now=now)
    assert (reported, replacements.seconds) == ([(None, 7)], ())


def test_nothing_is_expected_before_the_first_replacement() -> None:
    assert observed((0, 4, 4), (10, 3, 3)).arrivals(1, now=20) == ()


def test_arrivals_are_what_remains_of_earlier_replacements_that_took_longer() -> None:
    replacements = ReplacementTimes([10.0, 60.0, 100.0])
    for now, ready in ((0, 4), (100, 3)):
        replacements.observe(nodes=ready, ready=ready, desired=4, now=now)
    assert replacements.arrivals(1, now=100) == (10, 60, 100)
    assert replacements.arrivals(1, now=130) == (30, 70)
    assert replacements.arrivals(1, now=300) == (200,), "it has taken longer than all of them"
    assert replacements.arrivals(2, now=130) == (10, 60, 100), "the second one is not missing yet"
    replacements.observe(nodes=2, ready=2, desired=4, now=400)
    assert replacements.arrivals(1, now=400) == (10, 60, 100), "the one that was lost last comes first"


def test_a_node_that_has_appeared_is_expected_by_how_long_nodes_take_to_start() -> None:
    replacements = observed((0, 4, 4), (10, 3, 3), (90, 4, 3), (98, 4, 4), (200, 3, 3), (210, 4, 3))
    assert replacements.seconds == (88,)
    assert replacements.arrivals(1, now=213) == (5,)
    replacements.observe(nodes=3, ready=3, desired=4, now=214)
    assert replacements.arrivals(1, now=215) == (88 - 15,), "the node has gone again"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5)), max_size=30))
def test_as_many_are_missing_as_are_desired_and_not_ready_at_most(counts: list[tuple[int, int, int]]) -> None:
    replacements = ReplacementTimes()
    for now, (first, second, desired) in enumerate(counts):
        nodes, ready = max(first, second), min(first, second)
        replacements.observe(nodes=nodes, ready=ready, desired=desired, now=float(now))
        assert max(0, desired - nodes) <= replacements.missing() <= max(0, desired - ready)
        assert all(seconds >= 0 for seconds in replacements.arrivals(1, float(now)))
    assert all(seconds > 0 for seconds in replacements.seconds)
