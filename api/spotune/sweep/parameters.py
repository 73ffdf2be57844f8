"""The search space of a sweep: for each field of the job, the values that trials may have."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Self

from pydantic import Field, WithJsonSchema, model_validator

from spotune.custom_resource.base import Section, expecting, invalid

MAX_PARAMETERS: Final = 16
MAX_VALUES: Final = 100
SEARCHED_SECTIONS: Final = ("model", "adapter", "dataset", "training")
"""Sections of a job that define what is trained. All others say how it runs: every trial would be the same model."""
NOT_SEARCHED: Final = ("training.evaluation", "dataset.eval")
"""Fields that say how a model is evaluated: trials that differ in them cannot be compared."""

ParameterValue = Annotated[
    str | bool | int | float,
    expecting("a text, a number, true or false"),
    WithJsonSchema({"x-kubernetes-preserve-unknown-fields": True}),
]
Range = Annotated[list[float], Field(min_length=2, max_length=2)]
IntegerRange = Annotated[list[int], Field(min_length=2, max_length=2)]


class ParameterSpec(Section):
    """The values of one field. Set exactly one of the fields below."""

    values: list[ParameterValue] | None = Field(default=None, min_length=1, max_length=MAX_VALUES)
    """One of these texts, numbers or booleans."""
    uniform: Range | None = None
    """A number between these two, such as [0.0, 0.1]."""
    log_uniform: Range | None = None
    """A number between these two whose logarithm is uniform, such as [1e-5, 1e-3]."""
    integer: IntegerRange | None = None
    """A whole number from the first to the second, both included."""

    @property
    def is_range(self) -> bool:
        """Whether there are infinitely many values."""
        return self.uniform is not None or self.log_uniform is not None

    @property
    def extremes(self) -> Sequence[Any]:
        """All values of a list; the lowest and the highest of a range."""
        found = next(each for each in (self.values, self.uniform, self.log_uniform, self.integer) if each is not None)
        return list(found)

    @property
    def all_values(self) -> Sequence[Any]:
        """All values, in order; only for lists and whole numbers."""
        if self.values is not None:
            return self.values
        assert self.integer is not None, "a range has infinitely many values"
        return range(self.integer[0], self.integer[1] + 1)

    @model_validator(mode="after")
    def _check_one_form(self) -> Self:
        given = [each for each in (self.values, self.uniform, self.log_uniform, self.integer) if each is not None]
        if len(given) != 1:
            invalid("", "set exactly one of values, uniform, logUniform and integer")
        if self.values is not None and len({(type(each), each) for each in self.values}) < len(self.values):
            invalid("values", "lists a value twice")
        for name, bounds in (("uniform", self.uniform), ("logUniform", self.log_uniform), ("integer", self.integer)):
            if bounds is not None and bounds[0] >= bounds[1]:
                invalid(name, "must be ascending: the lowest value, then the highest")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            invalid("logUniform", "must be more than 0: use uniform for other numbers")
        return self


def check_path(path: str) -> None:
    """Raise for a field of the job that a sweep cannot search.

    Raises:
        PydanticCustomError: The field does not change the trained model, or changes how it is evaluated.
    """
    if not path.startswith(tuple(f"{section}." for section in SEARCHED_SECTIONS)):
        sections = f"{', '.join(SEARCHED_SECTIONS[:-1])} and {SEARCHED_SECTIONS[-1]}"
        invalid("parameters", f"{path} does not define what is trained: use fields of {sections}")
    for field in NOT_SEARCHED:
        if path == field or path.startswith(f"{field}."):
            invalid("parameters", f"{path} changes how trials are evaluated: they could not be compared")
