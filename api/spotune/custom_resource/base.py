"""Base classes and field types that all sections of FinetuneJobs and ModelServices share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NoReturn

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

from spotune.units.durations import Duration

API_VERSION: Final = "spotune.dev/v1alpha1"

SOURCE_SCHEMES = ("hf", "s3", "gs", "az")
RAW_SOURCE_SCHEMES = (*SOURCE_SCHEMES, "http", "https")
MAX_SOURCE_CHARACTERS = 4096
"""Maximum length of a source. Kubernetes requires a bound for rules over sources in a list."""

EXPECTED = "x-expected"
"""Keyword in a union's JSON schema that holds the text of what is allowed."""


class Section(BaseModel):
    """Base class of every mapping in a job file.

    Attributes are snake_case in Python and camelCase in YAML. Unknown names are errors. Values are immutable and are
    not converted (``"3"`` is not a number), as on the API server.
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
    """Reject a combination of values from within a model validator.

    Args:
        field: camelCase path of the offending field, relative to the model that is being validated.
        reason: What is wrong and how to fix it, without the field's name.

    Raises:
        PydanticCustomError: Always.
    """
    raise PydanticCustomError("invalid", "{reason}", {"field": field, "reason": reason})


def changed_from_default(section: Section) -> list[str]:
    """Names in camelCase of the fields of a section that do not have their default."""
    fields = type(section).model_fields
    changed = [name for name, field in fields.items() if getattr(section, name) != field.get_default()]
    return [fields[name].alias or name for name in changed]


@dataclass(frozen=True)
class _ExpectedMessage(WrapValidator):
    """A validator that also puts its error text into the JSON schema."""

    expected: str = ""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {EXPECTED: self.expected}


def expecting(expected: str) -> WrapValidator:
    """Report one error for a union instead of one per member; ``expected`` describes the allowed values."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            result = handler(value)
        except ValidationError as error:
            raise PydanticCustomError("expected", "expected {expected}", {"expected": expected}) from error
        if isinstance(value, bool) and not isinstance(result, bool):  # True == 1, so Literal[1] accepts it
            raise PydanticCustomError("expected", "expected {expected}", {"expected": expected})
        return result

    return _ExpectedMessage(validate, expected=expected)


def with_cel_rules(*rules: tuple[str, str], max_length: int | None = None) -> WithJsonSchema:
    """JSON schema of a string with CEL rules, for the API server to repeat the check of the validator beside it.

    Args:
        rules: Pairs of a CEL expression that is true for allowed values, and the message for all others.
        max_length: Maximum number of characters. Kubernetes requires a bound for rules over lists.
    """
    validations = [{"rule": rule, "message": message} for rule, message in rules]
    bound = {"maxLength": max_length} if max_length is not None else {}
    return WithJsonSchema({"type": "string", **bound, "x-kubernetes-validations": validations})


def _expected_source(schemes: Sequence[str]) -> str:
    return f"a path or one of {', '.join(f'{scheme}://' for scheme in schemes)} with a name"


def _source_rule(schemes: Sequence[str]) -> str:
    return f"!self.contains('://') || self.matches('^({'|'.join(schemes)})://+[^/]')"


def _check_scheme(source: str, schemes: Sequence[str]) -> str:
    scheme, separator, path = source.partition("://")
    if not source or (separator and (scheme not in schemes or not path.strip("/"))):
        raise PydanticCustomError("expected", "expected {expected}", {"expected": _expected_source(schemes)})
    if len(source) > MAX_SOURCE_CHARACTERS:
        invalid("", f"has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are allowed")
    return source


def _check_source(source: str) -> str:
    return _check_scheme(source, SOURCE_SCHEMES)


def _check_raw_source(source: str) -> str:
    return _check_scheme(source, RAW_SOURCE_SCHEMES)


def _source_cel(schemes: Sequence[str]) -> WithJsonSchema:
    rule = f"self != '' && ({_source_rule(schemes)})"
    return with_cel_rules((rule, f"expected {_expected_source(schemes)}"), max_length=MAX_SOURCE_CHARACTERS)


Source = Annotated[str, AfterValidator(_check_source), _source_cel(SOURCE_SCHEMES)]
"""``hf://``, ``s3://``, ``gs://``, ``az://`` or a path. A relative path starts at the job file's folder or, in a
cluster, at the root of the shared volume."""

RawSource = Annotated[str, AfterValidator(_check_raw_source), _source_cel(RAW_SOURCE_SCHEMES)]
"""A ``Source`` of raw rows, which may be a file at ``http://`` or ``https://`` too."""


def _check_optional_source(source: str) -> str:
    return _check_source(source) if source else source


OptionalSource = Annotated[
    str,
    AfterValidator(_check_optional_source),
    with_cel_rules(
        (_source_rule(SOURCE_SCHEMES), f"expected {_expected_source(SOURCE_SCHEMES)}"), max_length=MAX_SOURCE_CHARACTERS
    ),
]
"""A ``Source`` or an empty string."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


def _more_than_zero(duration: Duration) -> Duration:
    if duration.seconds <= 0:
        invalid("", "must be longer than 0s")
    return duration


_LONGER_THAN_ZERO = {"rule": "self.matches('[1-9]')", "message": "must be longer than 0s"}

PositiveDuration = Annotated[
    Duration,
    AfterValidator(_more_than_zero),
    Field(json_schema_extra={"x-kubernetes-validations": [_LONGER_THAN_ZERO]}),
]


class SecretKeyRef(Section):
    """Reference to one key of a Secret in the namespace of the job or service."""

    name: str
    """Name of the Secret."""
    key: str
    """Key in the Secret."""
