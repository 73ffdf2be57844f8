"""The response of a supervisor's ``/progress``, parsed leniently, and how fresh it is.

A supervisor may be older or newer than the operator, broken, or another program at the same address. So a missing or
invalid field gets its default, and every value is limited to what a status can store: a response must never fail a
reconcile, and the API server must return each value exactly as it was written (or the operator would write it again
and again).

``PollResult.freshness`` classifies a poll. The first row that applies decides:

=================  =====================================================================  ==========================
freshness          when                                                                   what can be concluded
=================  =====================================================================  ==========================
``UNREACHABLE``    polls have failed for ``unreachable_seconds``                          nothing: training continues
``NO_RESPONSE``    no poll has succeeded yet                                              nothing yet
``DRIVER_SILENT``  an active phase, and the driver wrote its status over 20 s ago         the driver is probably gone
``RANKS_SILENT``   Training or Evaluating, and the last heartbeat of the ranks is far     a rank may be gone
                   older than the time between two heartbeats usually is
``REPEATED``       an active phase, but the supervisor is still in ``preflight`` or       nothing yet: the phase is a
                   ``waiting``, and reads no heartbeats of workers without a driver       previous supervisor's
``DRIVER_SILENT``  an active phase, and the driver wrote its status before the            the driver is probably gone
                   supervisor started
``FRESH``          otherwise                                                              the phase is current
=================  =====================================================================  ==========================

The active phases are ``Training``, ``Evaluating`` and ``Exporting``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic.alias_generators import to_camel

from spotune.job.status import max_silence
from spotune.job.training.evaluation import MAX_HARNESS_TASKS
from spotune.service.field_types import METRIC_NAME

_MAX_TEXT_LENGTH: Final = 2000
"""Maximum number of characters of a text: people read it in a condition."""
_MAX_CHECKS: Final = 50
_MAX_SCORES: Final = 8 * MAX_HARNESS_TASKS
"""Tasks have several scores each, and a group has those of its tasks. Names of 100 characters take 60 kB at most."""
_MAX_COUNT: Final = 2**53 - 1
"""Largest integer that every JSON parser reads exactly."""
_MAX_UNIX_TIME: Final = 253402300799.0
"""The last second of the year 9999, the latest time of RFC 3339."""
_MAX_ETA_SECONDS: Final = 1e9
_STALE_SECONDS: Final = 20.0
"""A running driver writes its status twice a second, unless the volume is slow."""
_PHASES_WITH_HEARTBEAT: Final = frozenset({"Training", "Evaluating"})
ACTIVE_PHASES: Final = frozenset({"Training", "Evaluating", "Exporting"})
"""Phases of the trainer in which the workers are at work."""


def _storable(text: str) -> str:
    """The text, limited in length and valid UTF-8: the API server would change a lone surrogate."""
    return text[:_MAX_TEXT_LENGTH].encode("utf-8", "replace").decode()


def _mappings(items: Any) -> Any:
    """The mappings in a list, limited in number; anything else unchanged."""
    return [item for item in items if isinstance(item, dict)][:_MAX_CHECKS] if isinstance(items, list) else items


def _scores(items: Any) -> Any:
    """The numbers in a mapping whose keys are metric names, limited in number; anything else unchanged."""
    if not isinstance(items, dict):
        return items
    numbers = {
        name: value
        for name, value in items.items()
        if isinstance(value, int | float) and re.fullmatch(METRIC_NAME, name)
    }
    return dict(list(numbers.items())[:_MAX_SCORES])


Text = Annotated[str, AfterValidator(_storable)]
Word = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]{0,63}$")]
"""A name in CamelCase that is valid as the reason of a condition."""
NodeName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""A name that Kubernetes accepts for a node."""
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Amount = Annotated[float, Field(ge=0)]
Time = Annotated[float, Field(ge=0, le=_MAX_UNIX_TIME)]
"""Unix time."""


class _LenientModel(BaseModel):
    """A part of the response. A missing or invalid field gets its default; an unknown one is ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, extra="ignore", frozen=True, strict=True, allow_inf_nan=False, validate_by_name=True
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _default_if_invalid(cls, value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "this validates fields"
        field = cls.model_fields[info.field_name]
        try:
            return validate(value)
        except ValidationError:
            if field.is_required():
                raise  # the part is useless without this field
            return field.get_default(call_default_factory=True)


class CheckpointResponse(_LenientModel):
    """The newest checkpoint: the step after which it was taken, and the Unix time of its commit."""

    step: Count
    time: Time


class BestResponse(_LenientModel):
    """The best evaluation so far: completed steps before it, and name and value of the metric."""

    step: Count
    metric: Text
    value: float


class UnfitNodeResponse(_LenientModel):
    """A node that the trainer leaves out: its name, what is wrong, Unix time, boot ID, and whether ranks run there."""

    node: NodeName
    reason: Text = ""
    since: Time = 0.0
    boot: Text = ""
    in_use: bool = False


class StragglerResponse(_LenientModel):
    """A rank that is slower than the others: its node, its time by the median, and Unix time since then."""

    rank: Count
    ratio: Amount
    node: Text = ""
    since: Time = 0.0


class RestartsResponse(_LenientModel):
    """Restarts of worker groups by cause; None: not in the response."""

    worker_lost: Count | None = None
    head_lost: Count | None = None
    preempted: Count | None = None
    hang: Count | None = None
    app_error: Count | None = None
    out_of_memory: Count | None = None


class CheckResponse(_LenientModel):
    """One check of the preflight; ``skipped`` if it could only repeat the failure of an earlier check."""

    name: Text = ""
    status: Literal["passed", "failed", "running", "skipped", ""] = ""
    message: Text = ""


class PreflightResponse(_LenientModel):
    """The preflight: whether all checks have passed."""

    passed: bool = False
    checks: Annotated[list[CheckResponse], BeforeValidator(_mappings)] = []


class SupervisorResponse(_LenientModel):
    """The state of the supervisor itself.

    ``job`` is the SHA-256 of the job file in use; empty until the supervisor has read one.
    """

    job: Text = ""
    state: Literal["preflight", "running", "waiting", "stopping", "stopped", "failed", "trained", ""] = ""
    message: Text = ""
    preflight: PreflightResponse = PreflightResponse()


class ProgressResponse(_LenientModel):
    """The fields of a ``/progress`` response that the operator uses; empty or None: not in the response."""

    phase: Word | Literal[""] = ""
    message: Text = ""
    adopting: bool = False
    """Whether no driver has found the workers; in an active phase, these report by themselves that they live."""
    generation: Count | None = None
    step: Count | None = None
    total_steps: Count | None = None
    epoch: Amount | None = None
    loss: float | None = None
    eval_loss: float | None = None
    eval_scores: Annotated[dict[str, float], BeforeValidator(_scores)] | None = None
    eval_step: Count | None = None
    best: BestResponse | None = None
    stopped_early: Text = ""
    export_problem: Text = ""
    export_step: Count | None = None
    tokens_per_second: Amount | None = None
    mfu: Amount | None = None
    age_seconds: Amount | None = None
    supervisor_seconds: Amount | None = None
    silent_seconds: Amount | None = None
    heartbeat_seconds: Amount | None = None
    eta_seconds: Annotated[float, Field(ge=0, le=_MAX_ETA_SECONDS)] | None = None
    resumed_from_step: Count | None = None
    steps_lost: Count | None = None
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    last_checkpoint: CheckpointResponse | None = None
    checkpoint_problem: Text = ""
    data_left_out: Text = ""
    restarts: RestartsResponse = RestartsResponse()
    unfit_nodes: Annotated[list[UnfitNodeResponse], BeforeValidator(_mappings)] | None = None
    stragglers: Annotated[list[StragglerResponse], BeforeValidator(_mappings)] | None = None
    supervisor: SupervisorResponse = SupervisorResponse()

    @property
    def is_stale(self) -> bool:
        """Whether the driver's status is so old that the driver is probably gone."""
        return self.age_seconds is not None and self.age_seconds > _STALE_SECONDS

    @property
    def precedes_supervisor(self) -> bool:
        """Whether the driver wrote its status before the supervisor started.

        A driver that outlives its supervisor writes a newer one at once.
        """
        age, uptime = self.age_seconds, self.supervisor_seconds
        return age is not None and uptime is not None and age > uptime

    @property
    def is_silent(self) -> bool:
        """Whether the last heartbeat of training ranks is so old that one of them may be gone."""
        limit = max_silence(self.heartbeat_seconds)
        return self.phase in _PHASES_WITH_HEARTBEAT and (self.silent_seconds or 0.0) > limit

    @property
    def _trust(self) -> tuple[bool, bool, bool]:
        """What `PollResult.freshness` takes from the times."""
        return self.is_stale, self.is_silent, self.precedes_supervisor

    def same_progress(self, other: ProgressResponse) -> bool:
        """Whether two responses differ in nothing but values that change all the time: ETA, ages and goodput."""
        names = ("eta_seconds", "age_seconds", "supervisor_seconds", "silent_seconds", "heartbeat_seconds", "goodput")
        times = dict.fromkeys(names)
        if self._trust != other._trust:
            return False
        return self.model_copy(update=times) == other.model_copy(update=times)


def parse_progress(content: Mapping[str, Any]) -> ProgressResponse:
    """The response in a JSON object; never fails."""
    return ProgressResponse.model_validate(dict(content))


class Freshness(StrEnum):
    """How far a poll can be trusted; the module docstring has the rule."""

    UNREACHABLE = "unreachable"
    NO_RESPONSE = "no-response"
    DRIVER_SILENT = "driver-silent"
    RANKS_SILENT = "ranks-silent"
    REPEATED = "repeated"
    FRESH = "fresh"

    @property
    def is_known(self) -> bool:
        """Whether the trainer does what the last poll says."""
        return self in (Freshness.REPEATED, Freshness.FRESH)


@dataclass(frozen=True)
class PollResult:
    """The last ``/progress`` response of a supervisor, or the reason why polling fails.

    Attributes:
        response: The last successful response; None before the first.
        requested_at: Unix time of its request: what the supervisor says is at least as new.
        failing_since: Unix time of the first failed poll since that response; None if the last poll succeeded.
        error: Why the last poll failed.
    """

    response: ProgressResponse | None = None
    requested_at: float = 0.0
    failing_since: float | None = None
    error: str = ""

    @property
    def progress(self) -> ProgressResponse:
        """The last response; an empty one before the first."""
        return self.response or ProgressResponse()

    def freshness(self, now: float, unreachable_seconds: float) -> Freshness:
        """How far the poll can be trusted; the module docstring has the rule.

        Args:
            now: Unix time.
            unreachable_seconds: Duration of failing polls after which a supervisor counts as unreachable.
        """
        is_active = self.progress.phase in ACTIVE_PHASES
        if self.failing_since is not None and now - self.failing_since >= unreachable_seconds:
            return Freshness.UNREACHABLE
        if self.response is None:
            return Freshness.NO_RESPONSE
        if is_active and self.response.is_stale:
            return Freshness.DRIVER_SILENT
        if self.response.is_silent:
            return Freshness.RANKS_SILENT
        waits = self.response.supervisor.state in ("preflight", "waiting")
        if is_active and waits and not self.response.adopting:
            return Freshness.REPEATED
        if is_active and self.response.precedes_supervisor:
            return Freshness.DRIVER_SILENT
        return Freshness.FRESH
