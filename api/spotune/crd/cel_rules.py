"""A CEL rule of the API server, and the rules that every kind shares.

Rules for a single string (a source, a template, a duration) are defined beside that string's validator, in
``spotune.job`` and ``spotune.service``. Rules that span several fields are in ``job_rules`` and ``service_rules``.
There, sections and fields with a default are always present when a rule runs. For all others, rules use ``has``.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic import BaseModel

from spotune.custom_resource.base import Section
from spotune.custom_resource.metadata import MAX_NAME_LENGTH, NAME_PATTERN

_RESERVED: Final = re.compile(
    r"(?<=[.])(as|break|const|continue|else|for|function|if|import|let|loop|package|namespace|return|in)\b"
)
"""A field whose name is a reserved word of CEL. Kubernetes knows the field `name` as `__name__` then."""


@dataclass(frozen=True)
class Rule:
    """One entry of ``x-kubernetes-validations``.

    Attributes:
        expression: CEL expression that is true for allowed values. Fields have their own names, also where these are
            reserved words of CEL, such as `function`.
        message: What is wrong and how to fix it, without the field's name.
        field: camelCase path of the offending field, relative to the section; empty for the section itself.
        reason: Kind of the error. The API server prints it before the message.
    """

    expression: str
    message: str
    field: str = ""
    reason: Literal["FieldValueInvalid", "FieldValueForbidden"] = "FieldValueInvalid"

    def as_json(self) -> dict[str, str]:
        """The rule as it appears in the CustomResourceDefinition."""
        place = {"fieldPath": f".{self.field}"} if self.field else {}
        reason = {"reason": self.reason} if self.reason != Rule.reason else {}
        return {"rule": _RESERVED.sub(r"__\1__", self.expression), "message": self.message} | place | reason


def unless_absent(rule: Rule, *sections: str) -> Rule:
    """A rule that holds as well if an object has none of the optional sections (CEL paths) that it reads."""
    absent = [f"!has({section}) || " for section in sections if f"{section}." in rule.expression]
    return replace(rule, expression=f"{''.join(absent)}({rule.expression})") if absent else rule


def has_defaults(path: str, section: type[BaseModel], but_for: Sequence[str] = ()) -> str:
    """CEL expression that is true if a section, which is always present, has only default values.

    Fields of which a rule cannot read the value (objects and lists of any kind, and booleans that may be a text as
    well) are left to the models.

    Args:
        path: CEL path of the section.
        section: Its model.
        but_for: camelCase names of the fields that may have any value.
    """
    return " && ".join(_default_values(path, section, but_for))


def _default_values(path: str, section: type[BaseModel], but_for: Sequence[str] = ()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        place, default = f"{path}.{field.alias or name}", field.get_default()
        if field.alias in but_for or name in but_for:
            continue
        if default is None:
            yield f"!has({place})"
        elif isinstance(default, Section):
            yield from _default_values(place, type(default))
        elif isinstance(default, list | tuple):
            yield f"{place} == {[*default]}"
        elif not isinstance(default, dict) and not _is_text_or_boolean(field.annotation):
            yield f"{place} == {_in_cel(default)}"


def _is_text_or_boolean(annotation: Any) -> bool:
    members = getattr(annotation, "__args__", ())
    return bool in members and len(members) > 1


def _in_cel(value: Any) -> str:
    """A default value in CEL: true, 1, 1.0 or 'text'."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else f"'{value}'"


NAME_RULES: Final = (
    Rule(
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
        f"metadata.name: {MAX_NAME_LENGTH} characters at most, because pod names are made from it",
    ),
    Rule(
        f"self.metadata.name.matches('^{NAME_PATTERN}$')",
        "metadata.name: use a-z, 0-9 and -, and start and end with a letter or digit",
    ),
)
"""Rules for the name of a custom resource, which `spotune.custom_resource.metadata` checks in files."""
