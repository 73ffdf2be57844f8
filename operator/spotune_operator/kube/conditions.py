"""Conditions by the rules of ``metav1.Condition``: the transition time changes with the status alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from spotune.custom_resource import Condition
from spotune.custom_resource.status import reference as reference
from spotune.custom_resource.status import referenced as referenced
from spotune.custom_resource.status import with_cause as with_cause
from spotune.units.timestamps import rfc3339, unix_time

ConditionStatus = Literal["True", "False", "Unknown"]

ORDER: Final = (
    "Ready",
    "Reconciling",
    "Stalled",
    "Complete",
    "Failed",
    "Suspended",
    "StorageReady",
    "ClusterReady",
    "NodesFit",
    "PreflightPassed",
    "DataPrepared",
    "Training",
    "NotProgressing",
    "CheckpointHealthy",
    "Served",
    "ModelAvailable",
    "ReplicasReady",
    "RolledOut",
)
"""The order of conditions in the status: those of kstatus, the outcome, then the parts as they come about; the parts of
a FinetuneJob first, then those of a ModelService."""
_WARNINGS: Final = {
    ("Stalled", "True"),
    ("Failed", "True"),
    ("NotProgressing", "True"),
    ("StorageReady", "False"),
    ("PreflightPassed", "False"),
    ("CheckpointHealthy", "False"),
    ("NodesFit", "False"),
}
_WARNING_REASONS: Final = {("RolledOut", "RolledBack")}

_MAX_REASON_LENGTH: Final = 1024
_MAX_MESSAGE_LENGTH: Final = 32768


@dataclass(frozen=True)
class Finding:
    """The content of one condition, without its times.

    Attributes:
        type: Type of the condition.
        status: Whether it is true.
        reason: One word in CamelCase, for programs.
        message: A sentence for people: what happened, to what, and what to do.
    """

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""

    @property
    def is_warning(self) -> bool:
        """Whether a person may have to act."""
        return (self.type, self.status) in _WARNINGS or (self.type, self.reason) in _WARNING_REASONS


def updated(previous: Sequence[Condition], findings: Iterable[Finding], generation: int, now: float) -> list[Condition]:
    """The conditions with new findings, in order; a condition without a finding stays unchanged."""
    before = {condition.type: condition for condition in previous}
    after = dict(before)
    for finding in findings:
        earlier = before.get(finding.type)
        changed = earlier is None or earlier.status != finding.status
        after[finding.type] = Condition(
            type=finding.type,
            status=finding.status,
            observed_generation=generation,
            last_transition_time=rfc3339(now) if earlier is None or changed else earlier.last_transition_time,
            reason=_one_word(finding.reason),
            message=finding.message[:_MAX_MESSAGE_LENGTH],
        )
    return sorted(after.values(), key=lambda condition: _rank(condition.type))


def _one_word(reason: str) -> str:
    """A valid reason of a ``metav1.Condition``; some reasons come from the kubelet, KubeRay and others."""
    word = re.sub(r"[^A-Za-z0-9_]", "", reason)[:_MAX_REASON_LENGTH]
    return word if word[:1].isalpha() else f"Reason{word}"


def find(conditions: Iterable[Condition], name: str) -> Condition | None:
    """The condition of this type; None if there is none."""
    return next((condition for condition in conditions if condition.type == name), None)


def is_true(conditions: Iterable[Condition], name: str) -> bool:
    """Whether a condition exists and is true."""
    condition = find(conditions, name)
    return condition is not None and condition.status == "True"


def since(conditions: Iterable[Condition], name: str) -> float | None:
    """Unix time of the last transition of a condition; None without the condition."""
    condition = find(conditions, name)
    return unix_time(condition.last_transition_time) if condition is not None else None


def _rank(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
