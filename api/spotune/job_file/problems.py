"""Turns Pydantic's validation errors into messages with field path, given and allowed values, and the nearest name."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spotune.errors import Problem
from spotune.job_file.yaml_file import Document, FieldPath

_TYPE_NAMES = {
    "string_type": "text (put it in quotes)",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with fields of its own",
}
_BOUNDS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
_MAX_GIVEN_CHARACTERS = 60


def describe_problems(error: ValidationError, document: Document, model: type[BaseModel]) -> list[Problem]:
    """All errors of a validation, sorted by line.

    Args:
        error: The errors.
        document: What was validated.
        model: The model that validated it, such as FinetuneJob.
    """
    problems = []
    for details in error.errors():
        path = _field_path(details)
        line = document.line(path)
        problems.append(Problem(_message(details, path, model), dotted(path), document.file, line))
    return sorted(problems, key=lambda problem: problem.line)


def dotted(path: FieldPath) -> str:
    """A path in the format of messages: ``spec.dataset.keep[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def parse_path(text: str) -> FieldPath:
    """The path of a field in the format of `dotted`."""
    parts = re.findall(r"[^.\[\]]+|\[\d+\]", text)
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def _field_path(details: ErrorDetails) -> FieldPath:
    """The path of an error. ``custom_resource.base.invalid`` names a field relative to the validated section."""
    field = details.get("ctx", {}).get("field", "")
    place = tuple(part for part in details["loc"] if part != "[key]")  # an error about a key of a mapping
    return (*place, *(field.split(".") if field else ()))


def _message(details: ErrorDetails, path: FieldPath, model: type[BaseModel]) -> str:
    kind, context, given = details["type"], details.get("ctx", {}), details["input"]
    if kind == "extra_forbidden":
        return _unknown_field(path, model)
    if kind == "missing":
        return "is required"
    if kind == "invalid":
        return str(context["reason"])
    if kind == "model_type" and given is None:
        return f"is empty; it needs fields such as {', '.join(list(_fields_at(path, model))[:4])}"
    if kind == "literal_error":
        return _not_allowed(given, _allowed_at(path, model))
    if kind == "too_long":
        return f"expected {_expected(details)}, not {context['actual_length']}"
    names = [str(value) for value in _allowed_at(path, model)] if kind == "expected" else []
    return f"expected {_expected(details)}, not {_as_yaml(given)}{_suggestion(str(given), names)}"


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "expected":
        return str(context["expected"])
    if kind in _BOUNDS:
        bound = next(value for name, value in context.items() if name in ("gt", "ge", "lt", "le"))
        return f"{_BOUNDS[kind]} {bound:g}" if isinstance(bound, float) else f"{_BOUNDS[kind]} {bound}"
    if kind == "too_short":
        return f"{_collection(context)} of at least {context['min_length']}"
    if kind == "too_long":
        return f"{_collection(context)} of at most {context['max_length']}"
    if kind == "string_too_long":
        return f"a text of at most {context['max_length']} characters"
    return _TYPE_NAMES.get(kind) or details["msg"]


def _collection(context: Mapping[str, Any]) -> str:
    return "a mapping" if context.get("field_type") == "Dictionary" else "a list"


def _as_yaml(given: Any) -> str:
    """A value as written in YAML, truncated if too long."""
    if given is None:
        return "an empty value"
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, dict | list):
        return "a mapping" if isinstance(given, dict) else "a list" if given else "an empty list"
    text = f'"{given}"' if isinstance(given, str) else str(given)
    return text if len(text) <= _MAX_GIVEN_CHARACTERS else f"{text[:_MAX_GIVEN_CHARACTERS]}..."


def _not_allowed(given: Any, values: list[Any]) -> str:
    """The message for a value that is not one of the allowed values, with the nearest one."""
    allowed = [str(value) for value in values]
    names = allowed[0] if len(allowed) == 1 else f"{', '.join(allowed[:-1])} or {allowed[-1]}"
    return f"expected {names}, not {_as_yaml(given)}{_suggestion(str(given), allowed)}"


def _suggestion(given: str, valid: list[str]) -> str:
    by_lower_case = {name.lower(): name for name in valid}
    nearest = get_close_matches(given.lower().replace("_", ""), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[nearest[0]]}?" if nearest else ""


def _unknown_field(path: FieldPath, model: type[BaseModel]) -> str:
    name = str(path[-1])
    siblings = list(_fields_at(path[:-1], model))
    suggestion = _suggestion(name, siblings)
    if suggestion:
        return f"is not a field{suggestion}"
    elsewhere = [dotted(place) for place in _all_fields(model, ()) if place[-1] == name]
    if elsewhere:
        return f"is not a field here; {name} is at {' and '.join(elsewhere[:3])}"
    return f"is not a field; {dotted(path[:-1]) or f'a {model.__name__}'} has {', '.join(siblings)}"


def _fields_at(path: FieldPath, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of the section at ``path``: annotations by camelCase name."""
    section: type[BaseModel] | None = model
    is_key = False
    for part in (part for part in path if isinstance(part, str)):
        if is_key:  # of a mapping whose values are sections
            is_key = False
            continue
        annotation = (_fields_of(section) if section else {}).get(part)
        section, is_key = _section_in(annotation), get_origin(annotation) is dict
    return _fields_of(section) if section else {}


def _fields_of(section: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in section.model_fields.items()}


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section in an annotation such as ``EvalSpec | None`` or a list of it; None if it holds plain values only."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _allowed_at(path: FieldPath, model: type[BaseModel]) -> list[Any]:
    """The values of the ``Literal`` at ``path``; for a list item, the values that items may have."""
    names = [part for part in path if isinstance(part, str)]
    return list(_literal_values(_fields_at(tuple(names[:-1]), model).get(names[-1])))


def _literal_values(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        if get_args(argument):
            yield from _literal_values(argument)
        elif isinstance(argument, str | int):
            yield argument


def _all_fields(section: type[BaseModel], path: FieldPath) -> Iterator[FieldPath]:
    """Paths of all fields of a section and its nested sections."""
    for name, annotation in _fields_of(section).items():
        yield (*path, name)
        inner = _section_in(annotation)
        if inner is not None:
            yield from _all_fields(inner, (*path, name))
