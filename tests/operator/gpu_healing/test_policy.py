"""The healing of lost GPUs on fake time, its actions carried out on nodes of plain values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from spotune.errors import UsageError
from spotune_operator.gpu_healing.policy import (
    CORDONED_FOR,
    GPU_HEALING,
    Action,
    Cordon,
    DeleteNode,
    Drain,
    GpuHealing,
    Note,
    RestartDevicePlugin,
    Uncordon,
    heal_gpus,
    healing_of,
    leaves_on_drain,
)
from spotune_operator.observe.nodes import NodeView

NOW = 1_800_000_000.0
ALL = GpuHealing(cordon=True, restart_device_plugin=True, drain=True, delete_node=True)
GPU = NodeView("gpu", gpu_capacity=2, gpu_allocatable=2)
BROKEN = replace(GPU, gpu_allocatable=1)


@dataclass
class World:
    """Nodes, and an operator with nothing but their annotations to remember by."""

    settings: GpuHealing = ALL
    nodes: dict[str, NodeView] = field(default_factory=lambda: {"gpu": GPU})
    reports: dict[str, float] = field(default_factory=dict)
    now: float = NOW

    def set(self, name: str = "gpu", **changes: Any) -> None:
        self.nodes[name] = replace(self.nodes[name], **changes)

    def look(self) -> list[type[Action]]:
        """What is done by one look, each on the node as it was then."""
        actions = heal_gpus(list(self.nodes.values()), self.reports, self.settings, self.now)
        for action in actions:
            self._carry_out(action)
        return [type(action) for action in actions]

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, DeleteNode):
            del self.nodes[action.node]
            return
        node = self.nodes[action.node]
        annotations = {**node.annotations, **action.annotations}
        kept = {name: value for name, value in annotations.items() if value is not None}
        unschedulable = {Cordon: True, Uncordon: False}.get(type(action), node.unschedulable)
        self.nodes[action.node] = replace(node, annotations=kept, unschedulable=unschedulable)

    def run(self, seconds: float, every: float = 10.0) -> list[tuple[float, type[Action]]]:
        """What is done within a time, each with its second, drains that are asked for again left out."""
        done: list[tuple[float, type[Action]]] = []
        begin = self.now
        while self.now < begin + seconds:
            found = [(self.now - begin, kind) for kind in self.look()]
            done += [item for item in found if not (item[1] is Drain and done and done[-1][1] is Drain)]
            self.now += every
        return done


def kinds(done: list[tuple[float, type[Action]]]) -> list[type[Action]]:
    return [kind for _, kind in done if kind is not Note]


def test_every_step_is_taken_in_its_time_until_the_node_is_gone() -> None:
    world = World(nodes={"gpu": BROKEN, "other": replace(GPU, name="other")})
    assert world.run(1200) == [
        (0, Note),
        (120, Cordon),
        (240, RestartDevicePlugin),
        (360, Drain),
        (960, DeleteNode),
    ]
    assert list(world.nodes) == ["other"]


def test_a_drain_is_asked_for_until_the_next_step() -> None:
    world = World(GpuHealing(cordon=True, drain=True))
    world.set(gpu_allocatable=0)
    world.run(400)
    assert world.look() == [Drain]
    world.now += 3600
    assert world.look() == [Drain]


@pytest.mark.parametrize("settings", [GpuHealing(), GpuHealing(restart_device_plugin=True), GpuHealing(cordon=True)])
def test_only_allowed_steps_are_taken(settings: GpuHealing) -> None:
    world = World(settings)
    world.set(gpu_allocatable=0)
    expected = {"cordon": Cordon, "restart-device-plugin": RestartDevicePlugin}
    assert kinds(world.run(7200)) == [expected[step] for step in settings.steps]


@pytest.mark.parametrize("steps", [{"drain": True}, {"delete_node": True, "cordon": True}])
def test_steps_that_are_of_no_use_alone_are_refused(steps: dict[str, bool]) -> None:
    with pytest.raises(UsageError, match="needs"):
        GpuHealing(**steps)


def test_a_device_plugin_that_is_updated_is_no_loss() -> None:
    world = World()
    world.set(gpu_allocatable=0)
    world.run(110)
    world.set(gpu_allocatable=2)
    assert world.run(600) == [(0, Note)]
    assert world.nodes["gpu"] == GPU


def test_a_node_that_has_its_gpus_again_is_uncordoned_at_once() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(250)
    assert world.nodes["gpu"].unschedulable
    assert world.nodes["gpu"].annotations[CORDONED_FOR] == "1 of 2 GPUs left"
    world.set(gpu_allocatable=2)
    assert world.look() == [Uncordon]
    assert not world.nodes["gpu"].unschedulable
    assert CORDONED_FOR not in world.nodes["gpu"].annotations
    assert world.look() == []


def test_a_gpu_that_the_plugin_does_not_find_any_more_is_not_healed() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(250)
    world.set(gpu_capacity=1, gpu_allocatable=1)  # off the bus: the plugin that was restarted counts one
    assert kinds(world.run(1200)) == [Drain, DeleteNode]


def test_what_did_not_last_is_not_tried_again() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(250)
    world.set(gpu_allocatable=2)
    world.run(60)
    world.set(gpu_allocatable=1)
    assert kinds(world.run(1500)) == [Cordon, Drain, DeleteNode]


def test_a_loss_long_after_the_last_is_a_new_one() -> None:
    for is_looked_at_meanwhile in (True, False):
        world = World(nodes={"gpu": BROKEN})
        world.run(250)
        world.set(gpu_allocatable=2)
        world.look()
        if is_looked_at_meanwhile:
            world.run(3700)
            assert world.nodes["gpu"] == GPU
        else:
            world.now += 3700
        world.set(gpu_allocatable=1)
        assert kinds(world.run(300)) == [Cordon, RestartDevicePlugin]


def test_a_worker_that_found_no_gpu_is_believed_at_once() -> None:
    world = World(reports={"gpu": NOW - 10})
    assert world.look() == [Cordon]
    assert world.nodes["gpu"].annotations[CORDONED_FOR] == "a worker found no GPU"


def test_a_worker_that_finds_none_again_leads_to_the_next_step() -> None:
    world = World(reports={"gpu": NOW - 10})
    world.look()
    for expected in ([RestartDevicePlugin], [Drain], [DeleteNode]):
        world.now += world.settings.step_seconds - 1
        assert set(world.look()) <= {Drain}
        world.now += world.settings.drain_seconds if expected == [DeleteNode] else 1
        world.reports["gpu"] = world.now - 1
        assert world.look() == expected


def test_a_node_that_no_worker_complains_of_any_more_is_healed() -> None:
    world = World(reports={"gpu": NOW - 10})
    assert world.run(600) == [(0, Cordon), (120, Uncordon)]
    world.reports["gpu"] = world.now - 1
    assert kinds(world.run(60)) == [Cordon]
    world.reports["gpu"] = world.now - 1
    assert kinds(world.run(100)) == [RestartDevicePlugin]


def test_an_old_word_of_a_worker_counts_for_nothing() -> None:
    assert World(reports={"gpu": NOW - 200, "no-such-node": NOW}).look() == []


def test_a_node_in_somebody_elses_hands_is_left_alone() -> None:
    world = World(nodes={"gpu": replace(BROKEN, unschedulable=True)})
    assert world.run(7200) == []


def test_a_node_that_somebody_has_uncordoned_is_left_alone_until_it_is_well() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(130)
    world.set(unschedulable=False)
    assert world.run(7200) == []
    world.set(gpu_allocatable=2)
    assert world.look() == [Uncordon]
    assert CORDONED_FOR not in world.nodes["gpu"].annotations


def test_a_node_that_is_not_ready_is_left_to_its_cloud() -> None:
    world = World(nodes={"gpu": replace(BROKEN, ready=False, not_ready_since=NOW)})
    assert world.run(7200) == []


def test_where_many_nodes_lose_their_gpus_it_is_not_the_nodes() -> None:
    nodes = {f"n{number}": replace(BROKEN, name=f"n{number}") for number in range(3)}
    world = World(nodes=nodes)
    assert kinds(world.run(7200)) == []
    world.set("n0", gpu_allocatable=2)
    assert kinds(world.run(10)) == [Cordon, Cordon]


def test_nodes_without_gpus_are_never_touched() -> None:
    world = World(nodes={"cpu": NodeView("cpu")})
    assert world.run(7200) == []
    assert world.nodes == {"cpu": NodeView("cpu")}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yes",
        "null",
        "[]",
        "7",
        '{"gpus": 1}',
        '{"gpus": "two", "since": "2026-11-21T10:00:00Z"}',
        '{"gpus": 1, "since": "yesterday"}',
        '{"gpus": 1, "since": "2026-11-21T10:00:00Z", "step": "explode"}',
        '{"gpus": 1, "since": "2026-11-21T10:00:00Z", "step": ["cordon"]}',
        '{"gpus": 1, "since": "2026-11-21T10:00:00Z", "more": 1}',
    ],
)
def test_an_annotation_that_is_not_ours_is_as_good_as_none(text: str) -> None:
    node = replace(BROKEN, annotations={GPU_HEALING: text})
    assert healing_of(node) is None
    assert kinds(World(nodes={"gpu": node}).run(130)) == [Cordon]


def test_the_annotation_can_be_read() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(130)
    assert json.loads(world.nodes["gpu"].annotations[GPU_HEALING]) == {
        "gpus": 2,
        "since": "2027-01-15T08:00:00Z",
        "reported": False,
        "step": "cordon",
        "at": "2027-01-15T08:02:00Z",
    }


def owned_by(kind: str) -> dict[str, Any]:
    return {"metadata": {"ownerReferences": [{"kind": kind, "name": "x", "controller": True}]}}


@pytest.mark.parametrize(
    ("pod", "leaves"),
    [
        ({"metadata": {}}, True),
        (owned_by("RayCluster"), True),
        (owned_by("ReplicaSet"), True),
        (owned_by("DaemonSet"), False),
        ({"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}}, False),
        ({"metadata": {"deletionTimestamp": "2026-11-21T10:00:00Z"}}, False),
        ({"metadata": {}, "status": {"phase": "Succeeded"}}, False),
    ],
)
def test_a_drain_evicts_what_runs_and_can_run_elsewhere(pod: Mapping[str, Any], leaves: bool) -> None:
    assert leaves_on_drain(pod) is leaves
