"""Where notifications go: the targets of the chart's value `notifications`, and what each wants to know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from spotune.errors import UsageError
from spotune_operator.kube.phase_change import PhaseChange

ALL: Final = "*"
PHASES: Final = frozenset(
    {
        # of jobs
        *(
            "Provisioning",
            "Starting",
            "Preflight",
            "Preparing",
            "WaitingForWorkers",
            "Loading",
            "Training",
            "Evaluating",
        ),
        *("Exporting", "Recovering", "Restarting", "Suspending", "Suspended", "Stalled", "Complete", "Failed"),
        # of sweeps and services alone
        *("Running", "Serving", "Upgrading", "RolledBack", "WaitingForModel", "Deploying"),
    }
)
"""All phases of jobs, sweeps and services."""
_DEFAULT_PHASES: Final = ("Complete", "Failed", "Stalled", "RolledBack")
"""Phases in which a person may want to act."""


def _known(phase: str) -> str:
    if phase != ALL and phase not in PHASES:
        raise ValueError(f"{phase} is not a phase: use {ALL} for all, or of {', '.join(sorted(PHASES))}")
    return phase


class Target(BaseModel):
    """A URL that gets notifications."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=True)

    name: str
    """Name for logs: that of the Secret. The URL is never logged, because webhooks have a password in it."""
    url_file: Path
    """File with the URL. It is read for every request, so a changed Secret needs no restart."""
    format: Literal["json", "slack"] = "json"
    """json: all fields. slack: a text, as for incoming webhooks of Slack, Mattermost and others."""
    phases: list[Annotated[str, AfterValidator(_known)]] = Field(default=list(_DEFAULT_PHASES))
    """Phases to be notified of; * for all."""
    namespaces: list[str] = []
    """Namespaces to be notified of; empty: all."""

    def wants(self, change: PhaseChange) -> bool:
        """Whether a change is sent to this target."""
        in_scope = not self.namespaces or change.namespace in self.namespaces
        return in_scope and (ALL in self.phases or change.phase in self.phases)

    def body(self, change: PhaseChange, identity: str, time: str) -> dict[str, Any]:
        """The content of a request.

        Args:
            change: The change.
            identity: The same for every attempt to send this change.
            time: Time of the change (RFC 3339).
        """
        if self.format == "slack":
            return {"text": _slack_text(change)}
        optional = {"step": change.step, "totalSteps": change.total_steps, "output": change.output or None}
        return {
            "id": identity,
            "time": time,
            "kind": change.kind,
            "namespace": change.namespace,
            "name": change.name,
            "uid": change.uid,
            "previousPhase": change.previous,
            "phase": change.phase,
            "message": change.message,
            **{name: value for name, value in optional.items() if value is not None},
        }


def parse_targets(text: str) -> list[Target]:
    """The targets in the variable ``SPOTUNE_OPERATOR_NOTIFICATIONS``; none if it is empty.

    Raises:
        UsageError: It is not a JSON list of targets.
    """
    if not text:
        return []
    try:
        return TypeAdapter(list[Target]).validate_python(json.loads(text))
    except ValidationError as error:
        problems = [f"notifications{_place(found['loc'])}: {found['msg']}" for found in error.errors()]
        raise UsageError("; ".join(problems)) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"notifications: SPOTUNE_OPERATOR_NOTIFICATIONS is not JSON: {error}") from error


def _place(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


_MESSAGE_CHARACTERS: Final = 1000


def _slack_text(change: PhaseChange) -> str:
    """One line, with the characters escaped that Slack's markup uses."""
    steps = f" at step {change.step}/{change.total_steps}" if change.step and change.total_steps else ""
    message = f": {change.message[:_MESSAGE_CHARACTERS]}" if change.message else ""
    output = f" Model: {change.output}" if change.output and change.phase == "Complete" else ""
    text = f"{change.kind} {change.namespace}/{change.name} is {change.phase}{steps}{message}{output}"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
