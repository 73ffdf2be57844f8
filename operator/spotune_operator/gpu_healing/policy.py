"""Nodes that lost GPUs, healed as people do it: cordon, restart the device plugin's pod, drain, delete the node.

Decided from what is known, without any I/O. Each step is taken only if it is allowed, and if the one before has not
helped. How far a node's healing is stands in an annotation of the node, so that it goes on with another operator.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, get_args

from spotune.errors import UsageError
from spotune_operator.kube.timestamps import rfc3339, unix_time
from spotune_operator.observe.nodes import PREFIX, NodeView

CORDONED_FOR: Final = f"{PREFIX}cordoned-for"
"""Annotation of nodes that we cordoned, with the reason; only these are uncordoned again."""
GPU_HEALING: Final = f"{PREFIX}gpu-healing"
"""Annotation of nodes with lost GPUs: a ``Healing`` in JSON."""

Step = Literal["cordon", "restart-device-plugin", "drain", "delete-node"]
_STEPS: Final[tuple[Step, ...]] = get_args(Step)


def leaves_on_drain(raw: Mapping[str, Any]) -> bool:
    """Whether a drain evicts this ``v1.Pod``: not those of DaemonSets, which come back at once, nor static ones."""
    metadata = raw["metadata"]
    owners = {owner["kind"] for owner in metadata.get("ownerReferences") or () if owner.get("controller")}
    is_static = "kubernetes.io/config.mirror" in (metadata.get("annotations") or {})
    has_ended = (raw.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not (owners & {"DaemonSet", "Node"} or is_static or has_ended or "deletionTimestamp" in metadata)


@dataclass(frozen=True)
class GpuHealing:
    """Which steps against lost GPUs may be taken, and when.

    Attributes:
        cordon: No new pods on the node.
        restart_device_plugin: Delete the plugin's pod, so that a new one looks for the GPUs again.
        drain: Evict what runs there, each pod with its own grace, which is the notice for ours.
        delete_node: Delete the Node, so that a cluster autoscaler gives the machine back.
        after_seconds: From the loss to the first step: a device plugin that is being updated is no loss. A worker that
            found no GPU counts for as long.
        step_seconds: What a step gets to help before the next is taken.
        drain_seconds: The same for the drain: disruption budgets may hold pods back for some time.
        relapse_seconds: A node that loses GPUs again within this time after it was healed is not treated again by what
            did not last, but by the next step.
        at_once: Where more nodes than this have lost GPUs at the same time, no step is taken: that is a driver or the
            device plugin, and not the nodes.
    """

    cordon: bool = False
    restart_device_plugin: bool = False
    drain: bool = False
    delete_node: bool = False
    after_seconds: float = 120.0
    step_seconds: float = 120.0
    drain_seconds: float = 600.0
    relapse_seconds: float = 3600.0
    at_once: int = 2

    def __post_init__(self) -> None:
        """Refuse steps that are of no use alone.

        Raises:
            UsageError: A drain without a cordon, or the deletion of a node without a drain.
        """
        if self.drain and not self.cordon:
            raise UsageError("healing of GPUs: drain needs cordon, or the pods come back to the same node")
        if self.delete_node and not self.drain:
            raise UsageError("healing of GPUs: delete_node needs drain, or pods lose their node without a notice")

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that may be taken, in their order."""
        allowed = (self.cordon, self.restart_device_plugin, self.drain, self.delete_node)
        return tuple(step for step, is_allowed in zip(_STEPS, allowed, strict=True) if is_allowed)


@dataclass(frozen=True)
class Healing:
    """How far the healing of a node is.

    Attributes:
        gpus: What the node had; a device plugin that does not find a GPU any more does not count it.
        reported: Whether it was a worker that found none, while the node itself counts them all.
        since: When the loss was seen (RFC 3339, as all times here).
        step: The last step taken, None before the first.
        at: When it was taken.
        healed: When all GPUs were there again; None before.
        tried: The last step of an earlier time that did not help for long.
    """

    gpus: int
    since: str
    reported: bool = False
    step: Step | None = None
    at: str | None = None
    healed: str | None = None
    tried: Step | None = None

    def annotation(self) -> dict[str, str | None]:
        """For a patch of the node."""
        content = {name: value for name, value in asdict(self).items() if value is not None}
        return {GPU_HEALING: json.dumps(content, separators=(",", ":"))}


def healing_of(node: NodeView) -> Healing | None:
    """What the node's annotation says; None if it has none, or one that somebody else has written."""
    try:
        found = Healing(**json.loads(node.annotations.get(GPU_HEALING, "null")))
        times = [unix_time(text) for text in (found.since, found.at, found.healed)]
        is_ours = times[0] is not None and {found.step, found.tried} <= {None, *_STEPS} and found.gpus > 0
    except (TypeError, ValueError):
        return None
    return found if is_ours else None


@dataclass(frozen=True)
class Action:
    """Something to do with a node.

    Attributes:
        node: Its name.
        annotations: To set (None: to remove), in the same request as what is done to the Node, else after the deed:
            none of these does harm a second time.
    """

    node: str
    annotations: Mapping[str, str | None] = field(default_factory=dict)


class Note(Action):
    """Set the annotations, and nothing else."""


class Cordon(Action):
    """Set ``spec.unschedulable``."""


class RestartDevicePlugin(Action):
    """Delete the pod of the device plugin on the node (``Provider.device_plugin_labels``)."""


class Drain(Action):
    """Evict, through the Eviction API, every pod that ``leaves_on_drain``; asked for again until the next step."""


class DeleteNode(Action):
    """Delete the Node."""


class Uncordon(Action):
    """Take ``spec.unschedulable`` away."""


_ACTIONS: Final[Mapping[Step, type[Action]]] = {
    "cordon": Cordon,
    "restart-device-plugin": RestartDevicePlugin,
    "drain": Drain,
    "delete-node": DeleteNode,
}


def heal_gpus(
    nodes: Collection[NodeView], reports: Mapping[str, float], settings: GpuHealing, now: float
) -> list[Action]:
    """The next step for every node that has lost GPUs, and what to undo on those that have them again.

    Without an allowed step nothing is done, and nodes that were cordoned before stay so.
    A node that somebody else has cordoned, or one of ours that somebody has uncordoned, is in a person's hands and left
    alone; so is one that is not ready, which its cloud replaces.

    Args:
        nodes: All nodes.
        reports: Unix time at which a worker last found no GPU, by the name of its node.
        settings: Which steps may be taken, and when.
        now: Unix time.
    """
    if not settings.steps:
        return []
    ready = [node for node in nodes if node.ready]
    patients = [_Patient(node, healing_of(node), reports.get(node.name), settings, now) for node in ready]
    lost = sum(patient.is_lost and patient.next_step is not None for patient in patients)
    actions = (patient.action(may_step=lost <= settings.at_once) for patient in patients)
    return [action for action in actions if action is not None]


@dataclass(frozen=True)
class _Patient:
    """A node, and what is known of its GPUs."""

    node: NodeView
    healing: Healing | None
    report: float | None
    settings: GpuHealing
    now: float

    @property
    def gpus(self) -> int:
        """What the node should have."""
        remembered = self.healing.gpus if self.healing else 0
        return max(self.node.gpu_capacity, remembered, int(self.is_reported))

    @property
    def is_reported(self) -> bool:
        """Whether a worker has found no GPU lately, and since the last step."""
        last_step = unix_time(self.healing.at or self.healing.healed) if self.healing else None
        return self.report is not None and self.report > max(self.now - self.settings.after_seconds, last_step or 0.0)

    @property
    def is_lost(self) -> bool:
        return self.node.gpu_allocatable < self.gpus or self.is_reported or self._may_be_reported_again()

    def _may_be_reported_again(self) -> bool:
        """Whether it is too early to tell if the last step has helped; where the node counts them, the node tells."""
        healing = self.healing
        if healing is None or healing.step is None:
            return False
        return healing.reported and self.now < self._due(healing)

    @property
    def is_in_other_hands(self) -> bool:
        return self.node.unschedulable != (CORDONED_FOR in self.node.annotations)

    @property
    def next_step(self) -> Step | None:
        """The next allowed step; those before ``tried`` are passed over, but for the cordon that they rest on."""
        step = self.healing.step if self.healing else None
        tried = self.healing.tried if self.healing else None
        for candidate in self.settings.steps:
            is_after_last = step is None or _STEPS.index(candidate) > _STEPS.index(step)
            if is_after_last and (
                candidate == "cordon" or tried is None or _STEPS.index(candidate) > _STEPS.index(tried)
            ):
                return candidate
        return None

    def action(self, *, may_step: bool) -> Action | None:
        if not self.is_lost:
            return self._released()
        if self.is_in_other_hands:
            return None
        healing = self._at_loss()
        if may_step and self.now >= self._due(healing):
            step = replace(self, healing=healing).next_step
            if step is not None:
                return self._taken(step, healing)
        if healing != self.healing:
            return Note(self.node.name, healing.annotation())
        return Drain(self.node.name) if healing.step == "drain" else None

    def _at_loss(self) -> Healing:
        """The healing as it goes on, begins, or begins again after a relapse."""
        if self.healing is not None and self.healing.healed is None:
            return self.healing
        tried = None if self.healing is None or self._was_for_long() else self.healing.tried
        reported = self.node.gpu_allocatable >= self.gpus
        return Healing(self.gpus, rfc3339(self.now), reported, tried=tried)

    def _was_for_long(self) -> bool:
        """Whether the last healing has lasted."""
        healed = unix_time(self.healing.healed) if self.healing else None
        return healed is not None and self.now >= healed + self.settings.relapse_seconds

    def _due(self, healing: Healing) -> float:
        """Unix time from which the next step may be taken; a worker's word needs no time to be believed."""
        if healing.step is None:
            seconds = 0.0 if self.is_reported else self.settings.after_seconds
            return (unix_time(healing.since) or self.now) + seconds
        seconds = self.settings.drain_seconds if healing.step == "drain" else self.settings.step_seconds
        return (unix_time(healing.at) or self.now) + seconds

    def _taken(self, step: Step, healing: Healing) -> Action:
        annotations = replace(healing, step=step, at=rfc3339(self.now)).annotation()
        if step == "cordon":
            why = (
                "a worker found no GPU" if self.is_reported else f"{self.node.gpu_allocatable} of {self.gpus} GPUs left"
            )
            annotations[CORDONED_FOR] = why
        return _ACTIONS[step](self.node.name, {} if step == "delete-node" else annotations)

    def _released(self) -> Action | None:
        """Of a node that has all its GPUs: what is left to undo."""
        if CORDONED_FOR in self.node.annotations:
            return Uncordon(self.node.name, self._remembered() | {CORDONED_FOR: None})
        if self.healing is None:
            return None
        if self.healing.healed is None:
            return Note(self.node.name, self._remembered())
        return Note(self.node.name, {GPU_HEALING: None}) if self._was_for_long() else None

    def _remembered(self) -> dict[str, str | None]:
        """What is kept of a healing that has helped, for the case of a relapse: nothing if it went by itself."""
        if self.healing is None or self.healing.step is None:
            return {GPU_HEALING: None}
        tried = max(self.healing.step, self.healing.tried or self.healing.step, key=_STEPS.index)
        healed = Healing(self.healing.gpus, self.healing.since, healed=rfc3339(self.now), tried=tried)
        return healed.annotation()
