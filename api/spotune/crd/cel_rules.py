"""A CEL rule of the API server, and the rules that every kind shares.

Rules for a single string (a source, a template, a duration) are defined beside that string's validator, in
``spotune.job`` and ``spotune.service``. Rules that span several fields are in ``job_rules`` and ``service_rules``.
There, sections and fields with a default are always present when a rule runs. For all others, rules use ``has``.
"""

from dataclasses import dataclass
from typing import Final, Literal

from spotune.custom_resource.metadata import MAX_NAME_LENGTH, NAME_PATTERN


@dataclass(frozen=True)
class Rule:
    """One entry of ``x-kubernetes-validations``.

    Attributes:
        expression: CEL expression that is true for allowed values.
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
        return {"rule": self.expression, "message": self.message} | place | reason


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
