"""A CEL rule of the API server, and the rules that every kind shares.

Rules for a single string (a source, a template, a duration) are defined beside that string's validator, in
``spotune.job`` and ``spotune.service``. Rules that span several fields are in ``job_rules`` and ``service_rules``.
There, sections and fields with a default are always present when a rule runs. For all others, rules use ``has``.

The API server evaluates all rules of an object at every write, also of its status. Most of that time goes into lookups:
one takes time in proportion to the fields that the section may have. So `merged` and `frozen_fields` make one rule of
several, which looks up once what they share, and `has_defaults` looks its section up once.
``benchmarks/results/cel_rules.json`` says what that saves.

The API server also refuses a definition with a rule that it estimates to be slow. It assumes the worst for a text,
list or object that it reads through a variable, as in ``[self.a].all(a, ...)``: compare those only with constants.
"""

import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic import BaseModel

from spotune.custom_resource.base import Section
from spotune.custom_resource.metadata import MAX_NAME_LENGTH, NAME_PATTERN

_TEXT_OR_RESERVED: Final = re.compile(
    r"'(?:[^'\\]|\\.)*'|"
    r"(?<=[.])(as|break|const|continue|else|for|function|if|import|let|loop|package|namespace|return|in)\b"
)
"""A text, or a field (the group) whose name is a reserved word of CEL. Kubernetes knows the field `in` as `__in__`."""


@dataclass(frozen=True)
class Rule:
    """One entry of ``x-kubernetes-validations``.

    Attributes:
        expression: CEL expression that is true for allowed values. Fields have their own names, also where these are
            reserved words of CEL, such as `function`.
        message: What is wrong and how to fix it, without the field's name.
        field: camelCase path of the offending field, relative to the section; empty for the section itself.
        reason: Kind of the error. The API server prints it before the message.
        message_expression: CEL expression of a more precise message. The API server evaluates it for refused values.
        combines: The rules that this one takes the place of, for the documentation.
    """

    expression: str
    message: str
    field: str = ""
    reason: Literal["FieldValueInvalid", "FieldValueForbidden"] = "FieldValueInvalid"
    message_expression: str = ""
    combines: tuple["Rule", ...] = ()

    def as_json(self) -> dict[str, str]:
        """The rule as it appears in the CustomResourceDefinition."""
        place = {"fieldPath": f".{self.field}"} if self.field else {}
        reason = {"reason": self.reason} if self.reason != Rule.reason else {}
        precise = {"messageExpression": _escaped(self.message_expression)} if self.message_expression else {}
        return {"rule": _escaped(self.expression), "message": self.message} | precise | place | reason


def _escaped(expression: str) -> str:
    return _TEXT_OR_RESERVED.sub(lambda found: f"__{found[1]}__" if found[1] else found[0], expression)


def single_rules(rules: Iterable[Rule]) -> Iterator[Rule]:
    """The rules as they were before any were combined."""
    for rule in rules:
        yield from rule.combines or (rule,)


def _guarded(rule: Rule, sections: Iterable[str]) -> Rule:
    """A rule that holds as well if an object has none of the optional sections (CEL paths)."""
    absent = "".join(f"!has({section}) || " for section in sections)
    return replace(rule, expression=f"{absent}({rule.expression})") if absent else rule


def _sections_read(rule: Rule, sections: Iterable[str]) -> tuple[str, ...]:
    return tuple(section for section in sections if f"{section}." in rule.expression)


def merged(rules: Iterable[Rule], optional: Sequence[str], shared: Sequence[str], place: str) -> Iterator[Rule]:
    """A few rules instead of many, with a message that names the field of each one that is broken.

    Rules that read different optional sections stay apart, so that each still holds for objects without its sections.

    Args:
        rules: Rules of one section.
        optional: CEL paths of optional sections. A rule that reads one holds for objects without it.
        shared: CEL paths that many of the rules read, the longer ones first. A merged rule looks each up once.
            They are always present, or optional sections.
        place: camelCase path of the section, which begins the names of fields in messages; empty for the whole object.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Rule]] = {}
    for rule in rules:
        groups.setdefault((rule.reason, _sections_read(rule, optional)), []).append(rule)
    for (_, sections), group in groups.items():
        yield _guarded(merge(group, shared, place), sections)


def merge(rules: Sequence[Rule], shared: Sequence[str], place: str) -> Rule:
    """One rule instead of several, which have the same reason; for the arguments, see `merged`."""
    if len(rules) == 1:
        return rules[0]
    expression = " && ".join(f"({rule.expression})" for rule in rules)
    for path in shared:
        expression = _bind_variable(path, expression)
    messages = " + ".join(f"(({rule.expression}) ? '' : {_named_message(rule, place)})" for rule in rules)
    return Rule(
        expression,
        "fields contradict one another: spotune validate names them",
        os.path.commonpath([rule.field.replace(".", "/") for rule in rules]).replace("/", "."),
        rules[0].reason,
        f"({messages}).trim()",
        tuple(single_rules(rules)),
    )


def _bind_variable(path: str, expression: str) -> str:
    """The expression with a variable for a path, but where the API server could then not estimate its cost."""
    name = path.rpartition(".")[2]
    place = re.escape(path)
    pattern = rf"(?<! in )(?<!== )(?!(?<=has\(){place}\)){place}\b(?![.\w]*\()(?![.\w]* (?:in|==) self\.)"
    with_name, lookups = re.subn(pattern, name, expression)
    return f"[{path}].all({name}, {with_name})" if lookups > 1 else expression


def _named_message(rule: Rule, place: str) -> str:
    """CEL expression of a sentence: the field and the rule's message."""
    field = ".".join(filter(None, (place, rule.field)))
    if rule.message_expression:
        return f"{_quoted(f'{field}: ')} + {rule.message_expression} + '. '"
    return _quoted(f"{field}: {rule.message}. ")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", r"\\").replace("'", r"\'") + "'"


def unchanged(path: str, *, optional: bool) -> str:
    """CEL expression that is true if an update leaves a field as it was.

    Args:
        path: CEL path of the field, relative to the object.
        optional: Whether the field may be absent.
    """
    new, old = f"self.{path}", f"oldSelf.{path}"
    same = f"{new} == {old}"
    return _alike(new, old, same) if optional else same


def _alike(new: str, old: str, same: str) -> str:
    """CEL expression that is true if two places are both absent, or both present and the same."""
    return f"has({new}) == has({old}) && (!has({new}) || {same})"


def frozen_fields(section: str, fields: Mapping[str, bool], message: str, *, optional: bool) -> Rule:
    """A rule that an update leaves fields of a section as they were. Its message begins with the names of the others.

    The whole section is compared first: that takes two lookups, and most updates change nothing in it.

    Args:
        section: CEL path of the section, relative to the object.
        fields: For each camelCase field that must not change whether it may be absent.
        message: What follows the names of the changed fields, or is the message if the section itself came or went.
        optional: Whether the section may be absent. If so, it must not come or go.
    """
    singles = tuple(
        Rule(unchanged(f"{section}.{name}", optional=absent), message, f"{section}.{name}", "FieldValueForbidden")
        for name, absent in fields.items()
    )
    same = " && ".join(f"({rule.expression})" for rule in singles)
    changed = " + ".join(f"(({rule.expression}) ? '' : ' {name}')" for rule, name in zip(singles, fields, strict=True))
    new, old = f"self.{section}", f"oldSelf.{section}"
    expression = f"{new} == {old} || ({same})"
    names = f"({changed}).trim().replace(' ', ', ') + {_quoted(f' {message}')}"
    if optional:
        expression = _alike(new, old, expression)
        names = f"(has({new}) && has({old}) ? {names} : {_quoted(message)})"
    return Rule(expression, message, section, "FieldValueForbidden", names, singles)


def has_defaults(path: str, section: type[BaseModel], but_for: Sequence[str] = ()) -> str:
    """CEL expression that is true if a section, which is always present, has only default values.

    Fields of which a rule cannot read the value (objects and lists of any kind, and booleans that may be a text as
    well) are left to the models.

    Args:
        path: CEL path of the section.
        section: Its model.
        but_for: camelCase names of the fields that may have any value.
    """
    name = path.rpartition(".")[2]
    return f"[{path}].all({name}, {' && '.join(_default_values(name, section, but_for))})"


def _default_values(path: str, section: type[BaseModel], but_for: Sequence[str] = ()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        place, default = f"{path}.{field.alias or name}", field.get_default()
        if field.alias in but_for or name in but_for:
            continue
        if default is None:
            yield f"!has({place})"
        elif isinstance(default, Section):
            yield has_defaults(place, type(default))
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
