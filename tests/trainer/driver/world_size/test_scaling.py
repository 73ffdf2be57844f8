"""The number of workers that a group starts with."""

from __future__ import annotations

import pytest

from spotune_trainer.driver.world_size.scaling import choose_world_size
from spotune_trainer.worker_group.ray_nodes import slots_by_node, slots_of_one_kind

NODES = [
    {"NodeID": "a", "Alive": True, "Resources": {"CPU": 8.0, "memory": 1e9}},
    {"NodeID": "b", "Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}},
    {"NodeID": "c", "Alive": False, "Resources": {"CPU": 4.0, "GPU": 4.0}},
    {"NodeID": "d", "Alive": True, "Resources": {"GPU": 1.5}},
]


def test_only_whole_slots_of_live_nodes_count() -> None:
    assert slots_by_node(NODES, gpus=True) == {"b": 2, "d": 1}
    assert slots_by_node(NODES, gpus=False) == {"a": 8, "b": 4}
    assert slots_by_node([], gpus=True) == {}


def test_types_of_gpus_never_train_together() -> None:
    a, b = {"spotune-gpu-type:a100": 1.0}, {"spotune-gpu-type:l4": 1.0}
    nodes = [{"NodeID": name, "Resources": kind} for name, kind in (("1", a), ("2", a), ("3", b), ("4", b), ("5", {}))]
    slots = dict.fromkeys("12345", 1)
    assert slots_of_one_kind(slots, nodes, {"3"}) == {"3": 1, "4": 1}, "as many: that of the running group"
    assert slots_of_one_kind(slots, nodes, {"1"}) == {"1": 1, "2": 1}
    assert slots_of_one_kind({**slots, "4": 2}, nodes, {"1"}) == {"3": 1, "4": 2}, "more slots"
    assert slots_of_one_kind({"5": 1}, nodes, set()) == {"5": 1}
    assert slots_of_one_kind({}, nodes, set()) == {}
    untyped = [{"NodeID": name, "Resources": {}} for name in "12345"]
    assert slots_of_one_kind(slots, untyped, {"3"}) == slots, "without pools, or with mixGpuTypes: all"


@pytest.mark.parametrize(
    ("slots", "waited", "size"),
    [
        (4, 0, 4),
        (9, 0, 4),
        (3, 0, None),
        (3, 29.9, None),
        (3, 30, 3),
        (2, 30, 2),
        (1, 1e6, None),
    ],
)
def test_waits_for_desired_workers_then_accepts_at_least_the_minimum(
    slots: int, waited: float, size: int | None
) -> None:
    found = choose_world_size(slots, minimum=2, desired=4, waited_seconds=waited, patience_seconds=30)
    assert found == size


@pytest.mark.parametrize(("slots", "size"), [(2, None), (3, 3), (4, 4), (9, 4)])
def test_as_many_workers_as_the_last_group_had_are_enough_after_a_notice(slots: int, size: int | None) -> None:
    found = choose_world_size(slots, minimum=1, desired=4, waited_seconds=0, patience_seconds=30, enough=3)
    assert found == size


@pytest.mark.parametrize(("minimum", "desired", "slots", "size"), [(4, 4, 3, None), (1, 2, 2, 2)])
def test_enough_workers_are_no_fewer_than_the_minimum_and_no_more_than_desired(
    minimum: int, desired: int, slots: int, size: int | None
) -> None:
    assert choose_world_size(slots, minimum, desired, waited_seconds=0, patience_seconds=30, enough=3) == size
