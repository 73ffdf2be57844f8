"""The policy for lost GPUs on fake time; its actions are executed on plain values."""

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
    Annotate,
    Cordon,
    DeleteNode,
    Drain,
    RestartDevicePlugin,
    Uncordon,
    heal_gpus,
    healing_of,
    is_evicted_by_drain,
)
from spotune_operator.observe.nodes import NodeView
from spotune_operator.settings import GpuHealing

NOW = 1_800_000_000.0
ALL = GpuHealing(cordon=True, restart_device_plugin=True, drain=True, delete_node=True)
GPU = NodeView("gpu", gpu_capacity=2, gpu_allocatable=2)
BROKEN = replace(GPU, gpu_allocatable=1)


@dataclass
class World:
    """Nodes, and an operator whose only state is their annotations."""

    settings: GpuHealing = ALL
    nodes: dict[str, NodeView] = field(default_factory=lambda: {"gpu": GPU})
    now: float = NOW
    messages: list[str] = field(default_factory=list)

    def set(self, name: str = "gpu", **changes: Any) -> None:
        self.nodes[name] = replace(self.nodes[name], **changes)

    def look(self) -> list[type[Action]]:
        """The actions of one check, each with the state of its node before it."""
        actions = heal_gpus(list(self.nodes.values()), self.settings, self.now)
        for action in actions:
            self._carry_out(action)
            self.messages += [action.message] if action.message else []
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
        """The actions within a time, each with its second, without repeated drains."""
        done: list[tuple[float, type[Action]]] = []
        begin = self.now
        while self.now < begin + seconds:
            found = [(self.now - begin, kind) for kind in self.look()]
            done += [item for item in found if not (item[1] is Drain and done and done[-1][1] is Drain)]
            self.now += every
        return done


def kinds(done: list[tuple[float, type[Action]]]) -> list[type[Action]]:
    return [kind for _, kind in done if kind is not Annotate]


def test_steps_are_taken_in_order_until_the_node_is_deleted() -> None:
    world = World(nodes={"gpu": BROKEN, "other": replace(GPU, name="other")})
    assert world.run(1200) == [
        (0, Annotate),
        (120, Cordon),
        (240, RestartDevicePlugin),
        (360, Drain),
        (960, DeleteNode),
    ]
    assert list(world.nodes) == ["other"]


def test_messages_say_what_has_changed_and_what_is_done() -> None:
    world = World(nodes={"gpu": BROKEN, "other": replace(GPU, name="other")})
    world.run(1200)
    assert world.messages == [
        "has only 1 of 2 GPUs left",
        "has only 1 of 2 GPUs left: cordoning it",
        "has only 1 of 2 GPUs left: deleting the pod of its device plugin, so that a new one looks for the GPUs again",
        "has only 1 of 2 GPUs left: evicting its pods",
        "has only 1 of 2 GPUs left: deleting the Node, so that the autoscaler returns the machine",
    ]


def test_message_about_a_healed_node_does_not_say_that_it_has_lost_gpus() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(250)
    world.set(gpu_allocatable=2)
    world.messages.clear()
    world.run(7200)
    assert world.messages == ["has all of its 2 GPUs again: uncordoning it"]


def test_drain_is_repeated_until_the_next_step() -> None:
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
def test_steps_without_the_one_that_they_need_are_refused(steps: dict[str, bool]) -> None:
    with pytest.raises(UsageError, match="needs"):
        GpuHealing(**steps)


def test_update_of_the_device_plugin_is_no_loss() -> None:
    world = World()
    world.set(gpu_allocatable=0)
    world.run(110)
    world.set(gpu_allocatable=2)
    assert world.run(600) == [(0, Annotate)]
    assert world.nodes["gpu"] == GPU


def test_node_with_all_its_gpus_is_uncordoned_at_once() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(250)
    assert world.nodes["gpu"].unschedulable
    assert world.nodes["gpu"].annotations[CORDONED_FOR] == "1 of 2 GPUs left"
    world.set(gpu_allocatable=2)
    assert world.look() == [Uncordon]
    assert not world.nodes["gpu"].unschedulable
    assert CORDONED_FOR not in world.nodes["gpu"].annotations
    assert world.look() == []


def test_gpu_missing_from_the_capacity_still_counts_as_lost() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(250)
    world.set(gpu_capacity=1, gpu_allocatable=1)  # off the bus: the plugin that was restarted counts one
    assert kinds(world.run(1200)) == [Drain, DeleteNode]


def test_step_that_did_not_last_is_skipped_after_a_relapse() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(250)
    world.set(gpu_allocatable=2)
    world.run(60)
    world.set(gpu_allocatable=1)
    assert kinds(world.run(1500)) == [Cordon, Drain, DeleteNode]


def test_loss_after_the_relapse_time_starts_over() -> None:
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


def test_node_cordoned_by_a_person_is_left_alone() -> None:
    world = World(nodes={"gpu": replace(BROKEN, unschedulable=True)})
    assert world.run(7200) == []


def test_node_uncordoned_by_a_person_is_left_alone_until_healed() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(130)
    world.set(unschedulable=False)
    assert world.run(7200) == []
    world.set(gpu_allocatable=2)
    assert world.look() == [Uncordon]
    assert CORDONED_FOR not in world.nodes["gpu"].annotations


def test_node_that_is_not_ready_is_left_to_its_cloud() -> None:
    world = World(nodes={"gpu": replace(BROKEN, ready=False, not_ready_since=NOW)})
    assert world.run(7200) == []


def test_no_step_is_taken_when_many_nodes_lose_gpus_at_once() -> None:
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
def test_invalid_annotation_is_ignored(text: str) -> None:
    node = replace(BROKEN, annotations={GPU_HEALING: text})
    assert healing_of(node) is None
    assert kinds(World(nodes={"gpu": node}).run(130)) == [Cordon]


def test_annotation_round_trips() -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(130)
    assert json.loads(world.nodes["gpu"].annotations[GPU_HEALING]) == {
        "gpus": 2,
        "since": "2027-01-15T08:00:00Z",
        "step": "cordon",
        "at": "2027-01-15T08:02:00Z",
    }


@pytest.mark.parametrize("reported", [False, True])
def test_healing_of_an_earlier_release_continues(reported: bool) -> None:
    world = World(nodes={"gpu": BROKEN})
    world.run(130)
    content = json.loads(world.nodes["gpu"].annotations[GPU_HEALING]) | {"reported": reported}
    annotations = {**world.nodes["gpu"].annotations, GPU_HEALING: json.dumps(content)}
    world.set(annotations=annotations)
    assert kinds(world.run(120)) == [RestartDevicePlugin]
    assert "reported" not in json.loads(world.nodes["gpu"].annotations[GPU_HEALING])


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
def test_drain_evicts_running_pods_that_can_run_elsewhere(pod: Mapping[str, Any], leaves: bool) -> None:
    assert is_evicted_by_drain(pod) is leaves
