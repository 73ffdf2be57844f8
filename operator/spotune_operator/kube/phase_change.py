"""A change of the phase of a job, sweep or service, for notifications."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from spotune.custom_resource import Condition
from spotune_operator.kube.conditions import find, referenced, with_cause

_EXPLAINS: Final = {"Stalled": "Stalled", "Failed": "Failed", "Complete": "Complete", "Suspended": "Suspended"}
"""The condition with the reason of a phase."""


@dataclass(frozen=True)
class PhaseChange:
    """A change of a phase.

    Attributes:
        kind: Kind of the object.
        namespace: Its namespace.
        name: Its name.
        uid: Its uid.
        version: ``resourceVersion`` of the status with the new phase.
        previous: The phase before; empty for a new object.
        phase: The phase now.
        message: Why, where a condition says it; empty otherwise.
        step: Completed optimizer steps of a job; None for others.
        total_steps: All optimizer steps of a job; None if unknown.
        output: Location of the trained model of a job; empty before.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    version: str
    previous: str
    phase: str
    message: str = ""
    step: int | None = None
    total_steps: int | None = None
    output: str = ""


OnPhaseChange = Callable[[PhaseChange], None]


def ignore(_: PhaseChange) -> None:
    """Do nothing, where nobody is notified."""


def reason_of(phase: str, conditions: Iterable[Condition]) -> str:
    """The message of the condition that explains a phase, with its cause; empty if none does."""
    found = list(conditions)
    condition = find(found, _EXPLAINS.get(phase, "Ready"))
    if condition is None or (phase in _EXPLAINS and condition.status == "False"):
        return ""
    cause = find(found, referenced(condition.message))
    return with_cause(condition.message, cause.message if cause is not None else None)
