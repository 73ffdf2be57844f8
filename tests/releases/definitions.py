"""Structural schemas of definitions as the API server uses them: defaults, pruning, and what a newer one narrows.

The rules in CEL are not evaluated here. The models have the same rules, and tests/cluster/test_specs.py compares both
on a real API server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import yaml

Schema = Mapping[str, Any]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LOWER_BOUNDS = ("minimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "maxLength", "maxItems", "maxProperties")
_SAME = (
    *("type", "pattern", "format", "default", "nullable", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
)
"""Keywords whose change may refuse stored objects, or give them another meaning."""


def schemas(definitions: str) -> dict[str, Schema]:
    """The schema of each kind in a YAML file of definitions."""
    found = {}
    for definition in yaml.load_all(definitions, Loader=_Loader):
        (version,) = definition["spec"]["versions"]
        found[definition["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return found


def with_defaults(value: Any, schema: Schema) -> Any:
    """A value with the defaults of fields that it lacks, outermost first, as the API server adds them."""
    value = deepcopy(value)
    _add_defaults(value, schema)
    return value


def _add_defaults(value: Any, schema: Schema) -> None:
    if isinstance(value, list):
        for item in value:
            _add_defaults(item, schema.get("items", {}))
    if not isinstance(value, dict):
        return
    for name, field in schema.get("properties", {}).items():
        if name not in value and "default" in field:
            value[name] = deepcopy(field["default"])
        if name in value:
            _add_defaults(value[name], field)
    others = schema.get("additionalProperties")
    if isinstance(others, Mapping):
        for item in value.values():
            _add_defaults(item, others)


def pruned(value: Any, schema: Schema) -> Any:
    """A value without the fields that a schema does not know."""
    if isinstance(value, list):
        return [pruned(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    others = schema.get("additionalProperties")
    if isinstance(others, Mapping):
        return {name: pruned(item, others) for name, item in value.items()}
    fields = schema.get("properties")
    if fields is None:
        return value
    return {name: pruned(item, fields[name]) for name, item in value.items() if name in fields}


def narrowed(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """What a newer schema refuses or understands otherwise than an older one, by field; nothing if it only adds.

    New rules in CEL are named, too: whether they refuse an old object depends on what they say. Two rules of a field
    with the same message are the same, however they are written.
    """
    yield from (f"{path}: {change}" for change in _narrowed_value(old, new))
    known = {(rule.get("fieldPath"), rule["message"]) for rule in old.get("x-kubernetes-validations", ())}
    for rule in new.get("x-kubernetes-validations", ()):
        if (rule.get("fieldPath"), rule["message"]) not in known:
            yield f"{path}: new rule {rule['rule']}"
    required = set(new.get("required", ())) - set(old.get("required", ()))
    yield from (f"{path}.{name}: is required now" for name in sorted(required))
    for name, field in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            yield f"{path}.{name}: is gone"
        else:
            yield from narrowed(field, new["properties"][name], f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(old.get(keyword), Mapping):
            yield from narrowed(old[keyword], new.get(keyword, {}), f"{path}[]")


def _narrowed_value(old: Schema, new: Schema) -> Iterator[str]:
    """As `narrowed`, of the keywords for a single value."""
    for keyword in _SAME:
        if old.get(keyword) != new.get(keyword) and not _only_adds_fields(keyword, old, new):
            yield f"{keyword} was {old.get(keyword)!r}, is {new.get(keyword)!r}"
    for keyword in (*_LOWER_BOUNDS, *_UPPER_BOUNDS):
        before, now = old.get(keyword), new.get(keyword)
        if now is not None and now != before and (before is None or (now > before) == (keyword in _LOWER_BOUNDS)):
            yield f"{keyword} was {before}, is {now}"
    before, now = old.get("enum"), new.get("enum")
    if now is not None and (before is None or not set(before) <= set(now)):
        yield f"enum was {before}, is {now}"


def _only_adds_fields(keyword: str, old: Schema, new: Schema) -> bool:
    """Whether the default of a section differs only in new fields, with the defaults that they have themselves."""
    before, now = old.get("default"), new.get("default")
    if keyword != "default" or not isinstance(before, dict) or not isinstance(now, dict):
        return False
    return bool(with_defaults(before, new) == with_defaults(now, new))
