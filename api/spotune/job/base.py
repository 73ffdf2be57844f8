"""What all parts of a FinetuneJob share: camelCase names, strict types, and errors that name the field."""

from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError

SOURCE_SCHEMES = ("hf", "s3", "gs", "az")

EXPECTED = "x-expected"
"""Keyword of a union's JSON schema: what is allowed, in words."""


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


@dataclass(frozen=True)
class _Expecting(WrapValidator):
    """A validator whose words are in the JSON schema, too."""

    expected: str = ""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {EXPECTED: self.expected}


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

    return _Expecting(validate, expected=expected)


def checked_by_server(*rules: tuple[str, str], max_length: int | None = None) -> WithJsonSchema:
    """The schema of a text that the API server checks as the validator beside it does.

    Args:
        rules: CEL that is true for what is allowed, and what is said otherwise.
        max_length: Most characters, where a rule over a list of such texts would be too dear without a bound.
    """
    validations = [{"rule": rule, "message": message} for rule, message in rules]
    bound = {"maxLength": max_length} if max_length is not None else {}
    return WithJsonSchema({"type": "string", **bound, "x-kubernetes-validations": validations})


_SOURCE_EXPECTED = f"a path or one of {', '.join(f'{scheme}://' for scheme in SOURCE_SCHEMES)} with a name"
_SOURCE_RULE = f"!self.contains('://') || self.matches('^({'|'.join(SOURCE_SCHEMES)})://+[^/]')"


def _check_source(source: str) -> str:
    scheme, separator, rest = source.partition("://")
    if not source or (separator and (scheme not in SOURCE_SCHEMES or not rest.strip("/"))):
        raise PydanticCustomError("expected", "expected {expected}", {"expected": _SOURCE_EXPECTED})
    return source


Source = Annotated[
    str,
    AfterValidator(_check_source),
    checked_by_server((f"self != '' && ({_SOURCE_RULE})", f"expected {_SOURCE_EXPECTED}")),
]
"""``hf://``, ``s3://``, ``gs://``, ``az://`` or a path; a relative path is relative to the job file's folder, or to the
root of the shared volume in a cluster."""


def _check_optional_source(source: str) -> str:
    return _check_source(source) if source else source


OptionalSource = Annotated[
    str, AfterValidator(_check_optional_source), checked_by_server((_SOURCE_RULE, f"expected {_SOURCE_EXPECTED}"))
]
"""A ``Source``, or empty."""

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


class SecretKeyRef(Section):
    """One key of a Secret in the job's namespace."""

    name: str
    """Name of the Secret."""
    key: str
    """Key within the Secret."""
