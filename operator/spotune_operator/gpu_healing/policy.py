"""Which step heals a node that has lost GPUs: cordon, restart the device plugin, drain, delete the node. Pure.

A step is taken only if it is allowed and the one before has not helped. The state of a node's healing is kept in an
annotation of the node, so that another operator continues it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from spotune.units.timestamps import rfc3339, unix_time
from spotune_operator.observe.nodes import PREFIX, NodeView
from spotune_operator.settings import GPU_HEALING_STEPS, GpuHealing, Step

CORDONED_FOR: Final = f"{PREFIX}cordoned-for"
"""Annotation of nodes that the operator cordoned, with the reason; it uncordons no others."""
GPU_HEALING: Final = f"{PREFIX}gpu-healing"
"""Annotation of nodes that have lost GPUs: a ``Healing`` as JSON."""


def is_evicted_by_drain(raw: Mapping[str, Any]) -> bool:
    """Whether a drain evicts this ``v1.Pod``: not those of DaemonSets, nor static, finished or terminating ones."""
    metadata = raw["metadata"]
    owners = {owner["kind"] for owner in metadata.get("ownerReferences") or () if owner.get("controller")}
    is_static = "kubernetes.io/config.mirror" in (metadata.get("annotations") or {})
    has_ended = (raw.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not (owners & {"DaemonSet", "Node"} or is_static or has_ended or "deletionTimestamp" in metadata)


@dataclass(frozen=True)
class Healing:
    """The state of a node's healing.

    Attributes:
        gpus: Number of GPUs before the loss; the device plugin may no longer count the lost ones.
        since: Time of the loss (RFC 3339, as all times here).
        step: The last step taken; None before the first.
        at: Time of that step.
        healed: Time at which all GPUs were back; None before.
        tried: The last step of an earlier healing that did not last.
    """

    gpus: int
    since: str
    step: Step | None = None
    at: str | None = None
    healed: str | None = None
    tried: Step | None = None

    def annotation(self) -> dict[str, str | None]:
        """The annotation for a patch of the node."""
        content = {name: value for name, value in asdict(self).items() if value is not None}
        return {GPU_HEALING: json.dumps(content, separators=(",", ":"))}


def healing_of(node: NodeView) -> Healing | None:
    """The healing in a node's annotation; None if the annotation is missing or invalid."""
    try:
        content = json.loads(node.annotations.get(GPU_HEALING, "null"))
        content.pop("reported", None)  # of earlier releases
        found = Healing(**content)
        times = [unix_time(text) for text in (found.since, found.at, found.healed)]
        is_ours = times[0] is not None and {found.step, found.tried} <= {None, *GPU_HEALING_STEPS} and found.gpus > 0
    except (AttributeError, TypeError, ValueError, RecursionError):
        return None
    return found if is_ours else None


@dataclass(frozen=True)
class Action:
    """An action on a node.

    Attributes:
        node: Its name.
        annotations: Annotations to set (None: to remove), in the same request as a change of the Node, otherwise after
            the action: every action may be repeated.
        message: What has changed and what is done about it, for the log: the rest of a sentence that begins with the
            node's name. Empty if the action is repeated.
    """

    node: str
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    message: str = ""


class Annotate(Action):
    """Set the annotations, and nothing else."""


class Cordon(Action):
    """Set ``spec.unschedulable``."""


class RestartDevicePlugin(Action):
    """Delete the pod of the device plugin on the node (``Provider.device_plugin_labels``)."""


class Drain(Action):
    """Evict every pod that ``is_evicted_by_drain`` with the Eviction API; repeated until the next step."""


class DeleteNode(Action):
    """Delete the Node."""


class Uncordon(Action):
    """Unset ``spec.unschedulable``."""


_ACTIONS: Final[Mapping[Step, type[Action]]] = {
    "cordon": Cordon,
    "restart-device-plugin": RestartDevicePlugin,
    "drain": Drain,
    "delete-node": DeleteNode,
}
_DESCRIPTIONS: Final[Mapping[Step, str]] = {
    "cordon": "cordoning it",
    "restart-device-plugin": "deleting the pod of its device plugin, so that a new one looks for the GPUs again",
    "drain": "evicting its pods",
    "delete-node": "deleting the Node, so that the autoscaler returns the machine",
}


def heal_gpus(nodes: Collection[NodeView], settings: GpuHealing, now: float) -> list[Action]:
    """The actions that are due: the next step for nodes that have lost GPUs, and the undoing for those healed.

    Without an allowed step there are none, and nodes that were cordoned before stay so. Two kinds of nodes are left
    alone: those whose cordon a person has set or removed, and those that are not ready, which the cloud replaces.

    Args:
        nodes: All nodes.
        settings: The allowed steps and their times.
        now: Unix time.
    """
    if not settings.steps:
        return []
    ready = [node for node in nodes if node.ready]
    candidates = [_NodeHealth(node, healing_of(node), settings, now) for node in ready]
    lost = sum(candidate.has_lost_gpus and candidate.next_step is not None for candidate in candidates)
    actions = (candidate.action(may_step=lost <= settings.at_once) for candidate in candidates)
    return [action for action in actions if action is not None]


@dataclass(frozen=True)
class _NodeHealth:
    """A node with the state of its GPUs."""

    node: NodeView
    healing: Healing | None
    settings: GpuHealing
    now: float

    @property
    def gpus(self) -> int:
        """Number of GPUs that the node should have."""
        return max(self.node.gpu_capacity, self.healing.gpus if self.healing else 0)

    @property
    def has_lost_gpus(self) -> bool:
        return self.node.gpu_allocatable < self.gpus

    @property
    def is_handled_by_a_person(self) -> bool:
        return self.node.unschedulable != (CORDONED_FOR in self.node.annotations)

    @property
    def next_step(self) -> Step | None:
        """The next allowed step; steps up to ``tried`` are skipped, except for the cordon that later ones need."""
        step = self.healing.step if self.healing else None
        tried = self.healing.tried if self.healing else None
        for candidate in self.settings.steps:
            is_helpful = candidate == "cordon" or _is_after(candidate, tried)
            if is_helpful and _is_after(candidate, step):
                return candidate
        return None

    def action(self, *, may_step: bool) -> Action | None:
        if not self.has_lost_gpus:
            return self._action_when_healed()
        if self.is_handled_by_a_person:
            return None
        healing = self._healing_after_loss()
        if may_step and self.now >= self._due(healing):
            step = replace(self, healing=healing).next_step
            if step is not None:
                return self._take(step, healing)
        if healing != self.healing:
            return Annotate(self.node.name, healing.annotation(), f"has only {self._gpus_left}")
        return Drain(self.node.name) if healing.step == "drain" else None

    def _healing_after_loss(self) -> Healing:
        """The healing that continues, begins, or begins again after a relapse."""
        if self.healing is not None and self.healing.healed is None:
            return self.healing
        tried = None if self.healing is None or self._has_lasted() else self.healing.tried
        return Healing(self.gpus, rfc3339(self.now), tried=tried)

    def _has_lasted(self) -> bool:
        """Whether the last healing has lasted for ``relapse_seconds``."""
        healed = unix_time(self.healing.healed) if self.healing else None
        return healed is not None and self.now >= healed + self.settings.relapse_seconds

    def _due(self, healing: Healing) -> float:
        """Unix time from which the next step may be taken."""
        if healing.step is None:
            return (unix_time(healing.since) or self.now) + self.settings.after_seconds
        seconds = self.settings.drain_seconds if healing.step == "drain" else self.settings.step_seconds
        return (unix_time(healing.at) or self.now) + seconds

    def _take(self, step: Step, healing: Healing) -> Action:
        annotations = replace(healing, step=step, at=rfc3339(self.now)).annotation()
        if step == "cordon":
            annotations[CORDONED_FOR] = self._gpus_left
        message = f"has only {self._gpus_left}: {_DESCRIPTIONS[step]}"
        return _ACTIONS[step](self.node.name, {} if step == "delete-node" else annotations, message)

    @property
    def _gpus_left(self) -> str:
        return f"{self.node.gpu_allocatable} of {self.gpus} GPUs left"

    def _action_when_healed(self) -> Action | None:
        """The action on a node that has all its GPUs: undo the cordon, or update the annotation."""
        message = f"has all of its {self.gpus} GPUs again"
        if CORDONED_FOR in self.node.annotations:
            annotations = self._healed_annotation() | {CORDONED_FOR: None}
            return Uncordon(self.node.name, annotations, f"{message}: uncordoning it")
        if self.healing is None:
            return None
        if self.healing.healed is None:
            return Annotate(self.node.name, self._healed_annotation(), message)
        return Annotate(self.node.name, {GPU_HEALING: None}) if self._has_lasted() else None

    def _healed_annotation(self) -> dict[str, str | None]:
        """The annotation after a healing, for the case of a relapse; None if no step was taken."""
        if self.healing is None or self.healing.step is None:
            return {GPU_HEALING: None}
        tried = max(self.healing.step, self.healing.tried or self.healing.step, key=GPU_HEALING_STEPS.index)
        healed = Healing(self.healing.gpus, self.healing.since, healed=rfc3339(self.now), tried=tried)
        return healed.annotation()


def _is_after(step: Step, other: Step | None) -> bool:
    """Whether a step comes after another one; every step comes after None."""
    return other is None or GPU_HEALING_STEPS.index(step) > GPU_HEALING_STEPS.index(other)
