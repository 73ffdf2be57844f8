"""Conditions of a job by the rules of ``metav1.Condition``: the time changes with the status alone, the order never."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from spotune.job import Condition
from spotune_operator.kube.timestamps import rfc3339, unix_time

Truth = Literal["True", "False", "Unknown"]

ORDER: Final = (
    "Ready",
    "Reconciling",
    "Stalled",
    "Complete",
    "Failed",
    "Suspended",
    "StorageReady",
    "ClusterReady",
    "PreflightPassed",
    "DataPrepared",
    "Training",
    "NotProgressing",
    "CheckpointHealthy",
)
"""All conditions: first kstatus' own and the ends, then the parts of a job in the order in which they come about."""
_WARNINGS: Final = {
    ("Stalled", "True"),
    ("Failed", "True"),
    ("NotProgressing", "True"),
    ("StorageReady", "False"),
    ("PreflightPassed", "False"),
    ("CheckpointHealthy", "False"),
}

_LONGEST_REASON: Final = 1024
_LONGEST_MESSAGE: Final = 32768


@dataclass(frozen=True)
class Finding:
    """What a pass found about one condition.

    Attributes:
        type: Name of the condition.
        status: Whether it holds.
        reason: One word for programs.
        message: A sentence for people.
    """

    type: str
    status: Truth
    reason: str
    message: str = ""

    @property
    def is_warning(self) -> bool:
        """Whether a person may have to act."""
        return (self.type, self.status) in _WARNINGS


def updated(previous: Sequence[Condition], findings: Iterable[Finding], generation: int, now: float) -> list[Condition]:
    """The conditions with new findings; those that nothing was found about stay."""
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
            message=finding.message[:_LONGEST_MESSAGE],
        )
    return sorted(after.values(), key=lambda condition: _rank(condition.type))


def _one_word(reason: str) -> str:
    """A reason as ``metav1.Condition`` wants it; some come from the kubelet, KubeRay and others."""
    word = re.sub(r"[^A-Za-z0-9_]", "", reason)[:_LONGEST_REASON]
    return word if word[:1].isalpha() else f"Reason{word}"


def find(conditions: Iterable[Condition], name: str) -> Condition | None:
    """The condition of a name."""
    return next((condition for condition in conditions if condition.type == name), None)


def is_true(conditions: Iterable[Condition], name: str) -> bool:
    """Whether a condition is there and holds."""
    condition = find(conditions, name)
    return condition is not None and condition.status == "True"


def since(conditions: Iterable[Condition], name: str) -> float | None:
    """Unix time since which a condition has the status that it has."""
    condition = find(conditions, name)
    return unix_time(condition.last_transition_time) if condition is not None else None


def _rank(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
