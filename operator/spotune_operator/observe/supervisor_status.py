"""What a supervisor says at ``/progress``, read once: what is not as it should be counts as not said.

A supervisor may be older or newer than the operator, broken, or somebody else's program at the same address. Nothing
that it says may end a pass, or come into a status in a form that the API server refuses or gives back as another one
(which would be written again and again).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
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

_LONGEST_TEXT: Final = 2000
"""Characters of a text that are kept: it is for people, in a condition."""
_MOST_CHECKS: Final = 50
_MOST_SCORES: Final = 50
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}\Z")
_LARGEST_COUNT: Final = 2**53 - 1
"""JSON's numbers are exact up to here, whoever reads them."""
_END_OF_TIME: Final = 253402300799.0
"""The last second of the year 9999, after which RFC 3339 has no words."""
_LONGEST_WAIT_SECONDS: Final = 1e9
_OLD_SECONDS: Final = 20.0
"""A driver that lives writes twice a second, if the volume lets it."""
_SILENT_SECONDS: Final = 15.0
"""Workers that train give a sign of life with every micro-batch. A status is to be true within half a minute, and
supervisors are asked every 12 s at least."""
_WITH_SIGNS: Final = frozenset({"Training", "Evaluating"})


def _storable(text: str) -> str:
    """A text of limited length that UTF-8 can hold: half a surrogate pair would come back as another character."""
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()


def _mappings(items: Any) -> Any:
    """The items of a list that are mappings."""
    return [item for item in items if isinstance(item, dict)][:_MOST_CHECKS] if isinstance(items, list) else items


def _scores(items: Any) -> Any:
    """The numbers of a mapping whose keys are names."""
    if not isinstance(items, dict):
        return items
    numbers = {name: value for name, value in items.items() if isinstance(value, int | float) and _NAME.match(name)}
    return dict(list(numbers.items())[:_MOST_SCORES])


Text = Annotated[str, AfterValidator(_storable)]
Word = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]{0,63}$")]
"""A name in CamelCase, which may become the reason of a condition."""
Count = Annotated[int, Field(ge=0, le=_LARGEST_COUNT)]
Amount = Annotated[float, Field(ge=0)]
Time = Annotated[float, Field(ge=0, le=_END_OF_TIME)]
"""Unix time."""


class _Said(BaseModel):
    """A part of the answer. A field that is missing or wrong is as its default, and one that is not known no matter."""

    model_config = ConfigDict(
        alias_generator=to_camel, extra="ignore", frozen=True, strict=True, allow_inf_nan=False, validate_by_name=True
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _forgive(cls, value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "this validates fields"
        field = cls.model_fields[info.field_name]
        try:
            return validate(value)
        except ValidationError:
            if field.is_required():
                raise  # the part is worth nothing without it
            return field.get_default(call_default_factory=True)


class SaidCheckpoint(_Said):
    """The newest checkpoint: the step that it holds the state after, and when it was committed."""

    step: Count
    time: Time


class SaidRestarts(_Said):
    """Restarts of worker groups by cause; None: not said."""

    worker_lost: Count | None = None
    head_lost: Count | None = None
    preempted: Count | None = None
    hang: Count | None = None
    app_error: Count | None = None
    out_of_memory: Count | None = None


class SaidCheck(_Said):
    """One check of the preflight."""

    name: Text = ""
    status: Literal["passed", "failed", "running", ""] = ""
    message: Text = ""


class SaidPreflight(_Said):
    """The preflight: whether all checks have passed."""

    passed: bool = False
    checks: Annotated[list[SaidCheck], BeforeValidator(_mappings)] = []


class SaidSupervisor(_Said):
    """What the supervisor says of itself.

    ``job`` is the SHA-256 of the job file that it works by; empty before it has read one.
    """

    job: Text = ""
    state: Literal["preflight", "running", "waiting", "stopping", "stopped", "failed", "trained", ""] = ""
    message: Text = ""
    preflight: SaidPreflight = SaidPreflight()


class Said(_Said):
    """An answer of ``/progress``, as far as the operator understands it; empty, zero or None: not said."""

    phase: Word | Literal[""] = ""
    message: Text = ""
    generation: Count | None = None
    step: Count | None = None
    total_steps: Count | None = None
    epoch: Amount | None = None
    loss: float | None = None
    eval_loss: float | None = None
    eval_scores: Annotated[dict[str, float], BeforeValidator(_scores)] | None = None
    tokens_per_second: Amount | None = None
    mfu: Amount | None = None
    age_seconds: Amount | None = None
    silent_seconds: Amount | None = None
    eta_seconds: Annotated[float, Field(ge=0, le=_LONGEST_WAIT_SECONDS)] | None = None
    resumed_from_step: Count | None = None
    steps_lost: Count | None = None
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    last_checkpoint: SaidCheckpoint | None = None
    checkpoint_problem: Text = ""
    restarts: SaidRestarts = SaidRestarts()
    supervisor: SaidSupervisor = SaidSupervisor()

    @property
    def is_old(self) -> bool:
        """Whether the driver has written nothing for so long that it is likely to be gone: its last words stay."""
        return self.age_seconds is not None and self.age_seconds > _OLD_SECONDS

    @property
    def is_silent(self) -> bool:
        """Whether workers that train have given no sign of life for so long that one of them may be gone."""
        return self.phase in _WITH_SIGNS and (self.silent_seconds or 0.0) > _SILENT_SECONDS

    def says_the_same(self, other: Said) -> bool:
        """Whether nothing has happened between the two; the time left, their age and goodput change without that."""
        times = {"eta_seconds": None, "age_seconds": None, "silent_seconds": None, "goodput": None}
        if (self.is_old, self.is_silent) != (other.is_old, other.is_silent):
            return False
        return self.model_copy(update=times) == other.model_copy(update=times)


def understood(content: Mapping[str, Any]) -> Said:
    """What a JSON object says, whatever is in it."""
    return Said.model_validate(dict(content))


@dataclass(frozen=True)
class Reading:
    """What is known from asking a supervisor.

    Attributes:
        answer: The last one; None before the first.
        at: Unix time of it.
        failing_since: Unix time of the first of the failed tries since; None after a good one.
        error: Why the last try failed.
    """

    answer: Said | None = None
    at: float = 0.0
    failing_since: float | None = None
    error: str = ""

    @property
    def said(self) -> Said:
        """The last answer; one that says nothing before the first."""
        return self.answer or Said()
