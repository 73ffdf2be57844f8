"""Which pool carries which worker: single decisions, and pools that run dry and come back."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from spotune.pools.choice import choose
from spotune.pools.terms import MAX_PAUSE_SECONDS, Pool, PoolMemory, Wish, Worker, pause_seconds
from tests.api.support.simulated_pools import SimulatedPools

CHEAP, DEAR, LAST = Pool("cheap", 4, 60.0), Pool("dear", 4, 60.0), Pool("last", 4, 60.0)


def world(pools: tuple[Pool, ...] = (CHEAP, DEAR), count: int = 2, minimum: int = 1, **nodes: int) -> SimulatedPools:
    return SimulatedPools(pools, Wish(count, minimum, cooldown=300.0), {pool.name: 0 for pool in pools} | nodes)


def test_workers_start_in_the_first_pool() -> None:
    cluster = world(cheap=4, dear=4)
    cluster.run(60)
    assert cluster.ready() == {"cheap": 2}
    assert cluster.created == 2


def test_the_maximum_of_a_pool_sends_the_others_to_the_next_at_once() -> None:
    cluster = world((Pool("cheap", 1, 60.0), DEAR), cheap=4, dear=4)
    cluster.run(50)
    assert cluster.ready() == {"cheap": 1, "dear": 1}


def test_a_pool_that_refuses_sends_only_its_waiting_workers_to_the_next() -> None:
    cluster = world(cheap=1, dear=4)
    cluster.run(60)
    assert cluster.ready() == {"cheap": 1}
    cluster.run(60)
    assert cluster.ready() == {"cheap": 1, "dear": 1}
    assert cluster.memory["cheap"].refusals == 1
    assert cluster.moves == [], "the running worker is not touched"


def test_a_pool_that_refused_is_probed_with_one_worker_after_pauses_that_grow() -> None:
    cluster = world(count=3, dear=4)
    refused, most_waiting = [], 0
    for _ in range(250):
        before = cluster.memory.get("cheap", PoolMemory()).refused_at
        cluster.step(10)
        after = cluster.memory["cheap"].refused_at
        if after is not None and after != before:
            refused.append(after)
        if refused:
            most_waiting = max(most_waiting, cluster.waiting().get("cheap", 0))
    waits = [later - earlier - 60.0 for earlier, later in pairwise(refused)]
    assert waits[:4] == [60.0, 120.0, 240.0, 480.0]
    assert most_waiting == 1
    assert cluster.ready() == {"dear": 3}
    assert cluster.moves == []


def test_the_pause_has_a_limit() -> None:
    assert pause_seconds(CHEAP, 1) == 60.0
    assert pause_seconds(CHEAP, 1000) == MAX_PAUSE_SECONDS
    assert pause_seconds(Pool("slow", 1, 7200.0), 3) == 7200.0


def test_all_workers_move_together_when_a_better_pool_is_back() -> None:
    cluster = world(count=3, dear=4)
    cluster.run(200)
    assert cluster.ready() == {"dear": 3}
    cluster.nodes["cheap"] = 4
    cluster.run(900)
    assert cluster.ready() == {"cheap": 3}
    assert len(cluster.moves) == 3
    assert len(set(cluster.moves)) == 1, "one resize, not three"


def test_a_move_keeps_workers_until_their_replacements_are_ready() -> None:
    cluster = world(count=2, dear=4)
    cluster.run(200)
    cluster.nodes["cheap"] = 4
    for _ in range(60):
        cluster.step(10)
        assert sum(cluster.ready().values()) >= 2
    assert cluster.ready() == {"cheap": 2}


def test_no_two_moves_within_the_cooldown() -> None:
    cluster = world((CHEAP, DEAR, LAST), last=4)
    cluster.run(400)
    cluster.nodes["dear"] = 4
    cluster.run(700)
    assert cluster.ready() == {"dear": 2}
    first = cluster.moves[-1]
    cluster.nodes["cheap"] = 4
    cluster.run(2000)
    assert cluster.ready() == {"cheap": 2}
    assert min(moved for moved in cluster.moves if moved > first) - first >= 300.0


def test_every_pool_is_probed_while_workers_are_missing() -> None:
    cluster = world((CHEAP, DEAR, LAST), count=4)
    cluster.run(3600)
    assert cluster.waiting() == {"cheap": 1, "dear": 1, "last": 1}
    cluster.nodes["dear"] = 4
    cluster.run(10)
    assert cluster.ready() == {"dear": 1}
    cluster.run(50)
    assert cluster.ready() == {"dear": 4}


def test_fewer_workers_leave_the_worst_pool_first() -> None:
    cluster = world((Pool("cheap", 1, 60.0), DEAR), count=3, cheap=4, dear=4)
    cluster.run(60)
    assert cluster.ready() == {"cheap": 1, "dear": 2}
    cluster.wish = Wish(1, 1, 300.0)
    cluster.run(20)
    assert cluster.ready() == {"cheap": 1}


def test_what_was_refused_survives_a_restart_of_the_operator() -> None:
    """The choice depends on nothing but its arguments."""
    memory = {"cheap": PoolMemory(2, refused_at=900.0, retry_at=1020.0)}
    choice = choose([CHEAP, DEAR], [], memory, Wish(2), moved_at=None, now=1000.0)
    assert choice.replicas == {"cheap": 0, "dear": 2}
    assert choice.next_change == 1020.0
    assert choose([CHEAP, DEAR], [], memory, Wish(2), moved_at=None, now=1020.0).replicas == {"cheap": 1, "dear": 2}


def test_a_worker_that_leaves_is_named_until_it_is_gone() -> None:
    waiting = Worker("cheap-1", "cheap", created=900.0)
    first = choose([CHEAP, DEAR], [waiting], {}, Wish(1), moved_at=None, now=1000.0)
    assert (first.replicas, first.memory["cheap"].leaving) == ({"cheap": 0, "dear": 1}, ("cheap-1",))
    again = choose([CHEAP, DEAR], [waiting], first.memory, Wish(1), moved_at=None, now=1001.0)
    assert (again.replicas, again.memory) == (first.replicas, first.memory), "and its refusal counts once"
    assert choose([CHEAP, DEAR], [], again.memory, Wish(1), moved_at=None, now=1002.0).memory["cheap"].leaving == ()


def test_a_worker_of_a_reclaimed_node_is_replaced_before_it_is_gone() -> None:
    going = Worker("cheap-1", "cheap", created=900.0, has_node=True, ready=True, is_going=True)
    choice = choose([CHEAP, DEAR], [going], {}, Wish(1), moved_at=None, now=1000.0)
    assert (choice.replicas["cheap"], choice.memory["cheap"].leaving) == (1, ("cheap-1",))


def test_no_workers_while_none_are_wanted() -> None:
    assert choose([CHEAP, DEAR], [], {}, Wish(0), moved_at=None, now=1000.0).replicas == {"cheap": 0, "dear": 0}


# GPU types

A, B = Pool("a", 4, 60.0, "a100"), Pool("b", 4, 60.0, "l4")


def test_kinds_do_not_mix_while_one_lacks_workers() -> None:
    cluster = world((A, B), count=3, a=2, b=2)
    cluster.run(3600)
    assert cluster.ready() == {"a": 2}, "two of the other kind would be no better"
    cluster.nodes["b"] = 3
    cluster.run(3600)
    assert cluster.ready() == {"b": 3}


def test_a_better_kind_takes_over_when_it_is_complete() -> None:
    cluster = world((A, B), count=2, b=4)
    cluster.run(200)
    assert cluster.ready() == {"b": 2}
    cluster.nodes["a"] = 1
    cluster.run(3600)
    assert cluster.ready().get("b") == 2, "one node is not enough for the group"
    cluster.nodes["a"] = 2
    cluster.run(7200)
    assert cluster.ready() == {"a": 2}
    assert len(set(cluster.moves[-2:])) == 1


def test_kinds_mix_if_allowed() -> None:
    cluster = world((Pool("a", 4, 60.0), Pool("b", 4, 60.0)), count=3, a=2, b=2)
    cluster.run(200)
    assert cluster.ready() == {"a": 2, "b": 1}


# Any history

KINDS = st.sampled_from(["", "", "a100", "l4"])
HISTORIES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 80)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(KINDS, min_size=4, max_size=4),
    most=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    count=st.integers(1, 4),
    minimum=st.integers(1, 2),
    history=HISTORIES,
)
def test_any_history_of_nodes(
    kinds: list[str], most: list[int], count: int, minimum: int, history: list[tuple[int, int, int]]
) -> None:
    """No more pods than asked for, no two moves within the cooldown; and where there is room, the best pools win."""
    pools = tuple(Pool(f"p{number}", most[number], 60.0, kinds[number]) for number in range(4))
    cluster = world(pools, count, min(minimum, count))
    for pool, nodes, steps in history:
        cluster.nodes[f"p{pool}"] = nodes
        for _ in range(steps):
            cluster.step(10)
            waiting, total = cluster.waiting(), len(cluster.workers)
            assert total <= 2 * count + len(pools), "the group, its replacements, and one probe a pool"
            closed = [name for name in waiting if cluster.memory[name].refusals and name not in cluster.ready()]
            assert all(waiting[name] <= count for name in closed)
    cluster.nodes = {pool.name: 5 for pool in pools}
    cluster.run(2 * MAX_PAUSE_SECONDS + 3600, every=30.0)
    _assert_best(cluster.ready(), pools, count)
    still = len(cluster.moves)
    cluster.run(3600, every=60.0)
    assert len(cluster.moves) == still, "it stays where it is best"


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 4), history=HISTORIES)
def test_moves_are_at_least_a_cooldown_apart(count: int, history: list[tuple[int, int, int]]) -> None:
    pools = tuple(Pool(f"p{number}", 4, 60.0) for number in range(4))
    cluster = world(pools, count)
    for pool, nodes, steps in history:
        cluster.nodes[f"p{pool}"] = nodes
        for _ in range(steps):
            cluster.step(10)
    times = sorted(set(cluster.moves))
    assert all(later - earlier >= 300.0 for earlier, later in pairwise(times))


def _assert_best(ready: dict[str, int], pools: tuple[Pool, ...], count: int) -> None:
    """Where all pools have room, the workers have one kind, and the best pools of it.

    Of the kinds that can carry a whole group, it is the one whose worst pool is the best. If none can, it is one that
    carries the most.
    """
    groups = {kind: _best_of([pool for pool in pools if pool.kind == kind], count) for kind in {p.kind for p in pools}}
    names = [pool.name for pool in pools]
    complete = [group for group in groups.values() if sum(group.values()) == count]
    if complete:
        assert ready == min(complete, key=lambda group: max(names.index(name) for name in group))
    else:
        assert ready in groups.values()
        assert sum(ready.values()) == max(sum(group.values()) for group in groups.values())


def _best_of(pools: list[Pool], count: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for pool in pools:
        if share := min(count - sum(found.values()), pool.most):
            found[pool.name] = share
    return found


def test_a_worker_that_starts_too_long_holds_nothing_up() -> None:
    """A surplus is removed although one of the replacements never gets ready."""
    found = [Worker(f"w{number}", "dear", 0.0, has_node=True, ready=True) for number in range(2)]
    found += [Worker("new", "cheap", 0.0, has_node=True, ready=True)]
    found += [Worker("stuck", "cheap", 100.0, has_node=True)]
    early = choose([CHEAP, DEAR], found, {}, Wish(2), moved_at=None, now=700.0)
    assert early.replicas == {"cheap": 2, "dear": 2}
    late = choose([CHEAP, DEAR], found, {}, Wish(2), moved_at=None, now=800.0)
    assert late.replicas == {"cheap": 2, "dear": 1}
