"""Converts the JSON schema that Pydantic generates from the models to a structural schema of Kubernetes.

A structural schema has a type everywhere, no ``$ref``, no ``additionalProperties: false`` (``kubectl`` rejects unknown
fields, or the API server prunes them), and hardly any unions; see
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema.
No field is nullable: the API server drops null values, and null means absent in the models too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel

from spotune.crd.cel_rules import Rule
from spotune.custom_resource.base import EXPECTED
from spotune.units.durations import Duration

Schema: TypeAlias = dict[str, Any]

VALIDATIONS = "x-kubernetes-validations"
INT_OR_STRING = "x-kubernetes-int-or-string"
PRESERVE_UNKNOWN_FIELDS = "x-kubernetes-preserve-unknown-fields"
MAX_DURATION_CHARACTERS = 64
"""Kubernetes estimates the cost of a CEL rule from the maximum length of the string."""
_COPIED_KEYWORDS = (
    "type",
    "enum",
    "format",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "pattern",
)


def structural_schema(model: type[BaseModel], rules: Mapping[type[BaseModel], Sequence[Rule]]) -> Schema:
    """The structural schema of a model, including the CEL rules of its sections."""
    pydantic_schema = model.model_json_schema(mode="validation")
    by_name = {section.__name__: section_rules for section, section_rules in rules.items()}
    return _Conversion(pydantic_schema.get("$defs", {}), by_name).section(pydantic_schema)


def without_defaults(schema: Schema) -> Schema:
    """The schema without default values, for an object such as the status whose writer sets every field."""
    kept = {keyword: value for keyword, value in schema.items() if keyword != "default"}
    if "properties" in schema:
        kept["properties"] = {name: without_defaults(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        kept["items"] = without_defaults(schema["items"])
    return kept


@dataclass(frozen=True)
class _Conversion:
    """Converts one schema.

    Attributes:
        definitions: Schemas of the sections by name (``$defs`` of Pydantic's schema).
        rules: CEL rules by section name.
    """

    definitions: Mapping[str, Schema]
    rules: Mapping[str, Sequence[Rule]]

    def section(self, schema: Schema) -> Schema:
        """An object with named fields."""
        converted: Schema = {"description": _one_line(schema["description"]), "type": "object"}
        if "required" in schema:
            converted["required"] = sorted(schema["required"])
        converted["properties"] = {name: self.field(field) for name, field in schema["properties"].items()}
        rules = [rule.as_json() for rule in self.rules.get(schema["title"], ())]
        return converted | ({VALIDATIONS: rules} if rules else {})

    def field(self, schema: Schema) -> Schema:
        """The schema of a field: its description and default, and the schema of its type."""
        converted = self.value(schema)
        source = schema if "description" in schema else converted  # else Pydantic left it to the section
        converted = {"description": _one_line(source["description"])} | {
            keyword: value for keyword, value in converted.items() if keyword != "description"
        }
        if schema.get("default") is not None:
            converted["default"] = _default(schema["default"], converted)
        return converted

    def value(self, schema: Schema) -> Schema:
        """The schema of a type, without the description and default of the field."""
        if "$ref" in schema:
            return self.section(self.definitions[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema and INT_OR_STRING not in schema:
            return self._union(schema)
        converted = {keyword: schema[keyword] for keyword in _COPIED_KEYWORDS if keyword in schema}
        converted |= {keyword: value for keyword, value in schema.items() if keyword.startswith("x-kubernetes-")}
        if "const" in schema:
            converted["enum"] = [schema["const"]]
        if "type" not in converted and "enum" in converted:
            return _untyped_enum(converted["enum"])
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if exclusive in schema and float(schema[exclusive]).is_integer():
                converted |= {bound: schema[exclusive], exclusive: True}
            elif exclusive in schema:  # the API server cuts such a bound to a whole number for values without fraction
                converted[VALIDATIONS] = [_exclusive_rule(bound, schema[exclusive])]
        if "items" in schema:
            converted["items"] = self.value(schema["items"])
        if isinstance(schema.get("additionalProperties"), dict):
            converted["additionalProperties"] = self.value(schema["additionalProperties"])
        return _with_duration_rule(converted)

    def _union(self, schema: Schema) -> Schema:
        """An optional field, or one of the few unions that a structural schema can express."""
        members = [member for member in schema["anyOf"] if member.get("type") != "null"]
        if len(members) == 1:
            return self.value(members[0])
        kinds = {member["type"] for member in members}
        if kinds == {"string", "integer"}:
            return _int_or_string(members, schema[EXPECTED])
        if kinds == {"string", "boolean"}:
            return _untyped_enum([*_constants(members), True, False])
        if kinds == {"string", "array"}:
            items = next(member["items"] for member in members if member["type"] == "array")
            return {
                PRESERVE_UNKNOWN_FIELDS: True,
                "items": self.value(items),
                "pattern": f"^({'|'.join(_constants(members))})$",
            }
        raise NotImplementedError(f"no structural schema for a union of {', '.join(sorted(kinds))}")


def _exclusive_rule(bound: str, value: float) -> dict[str, str]:
    """The CEL rule of an exclusive minimum or maximum."""
    sign, comparative = ("<", "less") if bound == "maximum" else (">", "greater")
    return {"rule": f"self {sign} {value}", "message": f"should be {comparative} than {value}"}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _default(default: Any, converted: Schema) -> Any:
    """The default of a field. For a section it is empty, because its fields have their own defaults.

    Sections with CEL rules are the exception: Kubernetes validates their default before it fills in fields.
    """
    if "properties" not in converted:
        return default
    return {name: value for name, value in default.items() if value is not None} if VALIDATIONS in converted else {}


def _constants(members: list[Schema]) -> list[str]:
    return [member["const"] for member in members if "const" in member]


def _untyped_enum(allowed: list[Any]) -> Schema:
    """An enum whose values have several types; a structural schema has no type then."""
    keyword = INT_OR_STRING if {type(value) for value in allowed} == {str, int} else PRESERVE_UNKNOWN_FIELDS
    return {keyword: True, "enum": allowed}


def _int_or_string(members: list[Schema], expected: str) -> Schema:
    texts = [f"self == '{constant}'" for constant in _constants(members)]
    texts += [f"self.matches({_quoted(member['pattern'])})" for member in members if "pattern" in member]
    minimum = next(member["minimum"] for member in members if member["type"] == "integer")
    rule = Rule(f"type(self) == int ? self >= {minimum} : {' || '.join(texts)}", f"expected {expected}")
    return {INT_OR_STRING: True, VALIDATIONS: [rule.as_json()]}


def _with_duration_rule(schema: Schema) -> Schema:
    """Replace the pattern of a duration by a CEL rule, because the error for a pattern shows only the pattern."""
    if schema.get("pattern") != Duration.PATTERN:
        return schema
    rule = Rule(f"self.matches({_quoted(Duration.PATTERN)})", f"expected {Duration.EXPECTED}")
    others = {keyword: value for keyword, value in schema.items() if keyword not in ("pattern", VALIDATIONS)}
    rules = [rule.as_json(), *schema.get(VALIDATIONS, [])]
    return others | {"maxLength": MAX_DURATION_CHARACTERS, VALIDATIONS: rules}


def _quoted(pattern: str) -> str:
    """A regular expression as a raw string of CEL."""
    return f"r'{pattern}'"
