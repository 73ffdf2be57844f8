"""Conditions and base class of the status of a job or service."""

import re
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from spotune.custom_resource.base import Section

_REFERENCE: Final = re.compile(r"see condition (\w+)\Z")

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class StatusSection(Section):
    """Base class of parts of the status. Unknown fields, as of a newer version, are ignored."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusSection):
    """A Kubernetes condition (metav1.Condition)."""

    type: str
    """Condition type, such as Ready."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    observed_generation: int = 0
    """metadata.generation that the condition was computed for."""
    last_transition_time: Timestamp
    """Time of the last change of status (RFC 3339)."""
    reason: str
    """Machine-readable reason in one CamelCase word."""
    message: str = ""
    """Human-readable message."""


Conditions = Annotated[
    list[Condition],
    Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
]
"""Conditions, at most one of each type."""


def reference(name: str) -> str:
    """The end of a message whose cause another condition holds."""
    return f"see condition {name}"


def referenced(message: str) -> str:
    """The type of the condition that a message refers to; empty if it refers to none."""
    found = _REFERENCE.search(message)
    return found[1] if found else ""


def with_cause(message: str, cause: str | None) -> str:
    """A message with its reference replaced by the message of the condition it refers to; unchanged without one."""
    return _REFERENCE.sub(lambda _: cause, message) if cause else message
