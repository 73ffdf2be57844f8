"""What all parts of a FinetuneJob share: camelCase names, strict types, and errors that name the field."""

from typing import Annotated, Any, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

SOURCE_SCHEMES = ("hf", "s3", "gs", "az")


class Section(BaseModel):
    """A mapping in a job file.

    Attributes are snake_case in Python and camelCase in YAML; unknown names are errors; values are immutable and
    not converted (``"3"`` is not a number), as the API server would have it.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def invalid(field: str, reason: str) -> NoReturn:
    """Refuses a combination of values, from within a model validator.

    Args:
        field: camelCase path of the offending field, relative to the model that is being validated.
        reason: What is wrong with it and what to do, a sentence without the field's name.

    Raises:
        PydanticCustomError: Always.
    """
    raise PydanticCustomError("invalid", "{reason}", {"field": field, "reason": reason})


def expecting(expected: str) -> WrapValidator:
    """One error instead of one per member of a union; ``expected`` says what is allowed."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            result = handler(value)
        except ValidationError as error:
            raise PydanticCustomError("expected", "expected {expected}", {"expected": expected}) from error
        if isinstance(value, bool) and not isinstance(result, bool):  # True == 1: a literal 1 would take it
            raise PydanticCustomError("expected", "expected {expected}", {"expected": expected})
        return result

    return WrapValidator(validate)


def _check_source(source: str) -> str:
    scheme, separator, rest = source.partition("://")
    allowed = ", ".join(f"{name}://" for name in SOURCE_SCHEMES)
    if not source or (separator and (scheme not in SOURCE_SCHEMES or not rest.strip("/"))):
        expected = f"a path or one of {allowed} with a name"
        raise PydanticCustomError("expected", "expected {expected}", {"expected": expected})
    return source


Source = Annotated[str, AfterValidator(_check_source)]
"""``hf://``, ``s3://``, ``gs://``, ``az://`` or a path; a relative path is relative to the job file's folder, or to the
root of the shared volume in a cluster."""


def _check_optional_source(source: str) -> str:
    return _check_source(source) if source else source


OptionalSource = Annotated[str, AfterValidator(_check_optional_source)]
"""A ``Source``, or empty."""

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


class SecretKeyRef(Section):
    """One key of a Secret in the job's namespace."""

    name: str
    """Name of the Secret."""
    key: str
    """Key within the Secret."""
