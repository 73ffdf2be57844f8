"""Writes the pages of docs/reference, of the models that check a job and of the help that the command line prints.

Run by `make manifests`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from spotune.cli.main import command_line
from spotune.crd.cel_rules import RULES
from spotune.crd.structural_schema import OPEN, VALIDATIONS, Schema, structural_schema
from spotune.job import FinetuneJob
from spotune.units.quantities import Quantity

_ROOT = Path(__file__).parent.parent
_PAGES = _ROOT / "docs/reference"
_EXAMPLE = "examples/text-to-sql/finetunejob.yaml"
_JOB_HEAD = """# FinetuneJob

Made from the models that check a job (`make manifests`). `spotune validate` and the API server refuse what is not as
it says here, with a sentence that names the field, and `spotune` says the nearest name to one that it does not know.
A job that trains on one machine ([{example}](../../{example})):

```yaml
{job}```

"""
_FROZEN = """A field that is *frozen* stays as it is once there is a checkpoint, one that *may grow* only grows: the API
server refuses anything else. All others may change at any time, and what happens then is on the page of
[the operator](../operator.md#changing-a-running-job). `spotune run` is less strict: to it `training.evaluation` and
`training.maxBadSteps` do not belong to [what is trained](../concepts.md#meaning-and-execution).

"""
_SECRETS = """## Secrets on one machine

Secrets are for clusters: the operator makes variables of the pods of them. `spotune run` takes the same variables from
its environment, and says which is missing. A job with `suspend` is for clusters alone.
"""
_COMMANDS_HEAD = """# The command line

Every command as its `--help` says it (`make manifests` writes this page). `spotune --version` prints the version; the
exit codes are in [the README](../../README.md#the-command-line).

"""


def finetune_job() -> str:
    """The page on every field of a FinetuneJob."""
    schema = structural_schema(FinetuneJob, RULES)
    example = (_ROOT / _EXAMPLE).read_text(encoding="utf-8")
    spec = schema["properties"]["spec"]
    page = _JOB_HEAD.format(example=_EXAMPLE, job=example[example.index("apiVersion") :])
    page += "## metadata\n\n" + _table(schema["properties"]["metadata"], {})
    page += f"## spec\n\n{spec['description']}\n\n{_FROZEN}{_sections(spec)}"
    changes = {
        rule.field.removeprefix("spec."): "may grow" if "grow" in rule.message else "frozen"
        for rule in RULES[FinetuneJob]
        if rule.reason == "FieldValueForbidden"
    }
    rules = list(dict.fromkeys(_rules(spec)))
    for name, section in spec["properties"].items():
        if "properties" in section:
            own = [f"- {text}\n" for text in rules if re.match(rf"`{name}\b", text)]
            page += f"## {name}\n\n{section['description']}\n\n{_table(section, changes, name)}"
            page += f"What is refused besides:\n\n{''.join(own)}\n" if own else ""
    status = schema["properties"]["status"]
    page += f"## status\n\n{status['description']}\n\n" + _table(status, {}, defaults=False)
    return page + _SECRETS


def commands() -> str:
    """The page on every command and option."""
    group = command_line()
    context = typer.Context(group, info_name="spotune")
    pages = [
        get_docs_for_click(obj=command, ctx=context, indent=1, name=name, call_prefix="spotune")
        for name, command in group.commands.items()
    ]
    return _COMMANDS_HEAD + "".join(_with_examples(page) for page in pages).rstrip() + "\n"


def files() -> dict[Path, str]:
    """What is made, by its path."""
    return {_PAGES / "finetunejob.md": finetune_job(), _PAGES / "command-line.md": commands()}


def _sections(spec: Schema) -> str:
    lines = ["| section | |\n|---|---|\n"]
    for name, section in spec["properties"].items():
        shown = f"[`{name}`](#{name})" if "properties" in section else f"`{name}`"
        needed = "**required**: " if name in spec["required"] else ""
        lines.append(f"| {shown} | {needed}{section['description']} |\n")
    return "".join(lines) + "\n"


def _table(section: Schema, changes: Mapping[str, str], path: str = "", *, defaults: bool = True) -> str:
    """The fields of a section and of those within it; with their changes where any of them is not free to change."""
    rows = list(_rows(section, path, changes, changes.get(path, "")))
    columns = [0, 1, *([2] if defaults else []), *([3] if any(row[3] for row in rows) else []), 4]
    titles = ("field", "type", "default", "once there is a checkpoint", "")
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join("| " + " | ".join(line[column] for column in columns) + " |\n" for line in lines) + "\n"


def _rows(section: Schema, path: str, changes: Mapping[str, str], change: str) -> Iterator[tuple[str, ...]]:
    for name, field in section["properties"].items():
        full = f"{path}.{name}".lstrip(".")
        own = changes.get(full, change)
        default = "**required**" if name in section.get("required", ()) else ""
        if not default and "default" in field and "properties" not in field:
            default = f"`{json.dumps(field['default'])}`"
        yield f"`{full}`", _kind(field), default, own, field["description"].replace("|", "\\|")
        if "properties" in field:
            yield from _rows(field, full, changes, own)
        elif "properties" in field.get("items", {}):
            yield from _rows(field["items"], f"{full}[]", changes, own)


def _kind(schema: Schema) -> str:
    """What a field may be, in words."""
    expected = [message.removeprefix("expected ") for message in _messages(schema) if message.startswith("expected ")]
    if "enum" in schema:
        return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in schema["enum"])
    if expected:
        return expected[0]
    if schema.get("pattern") == Quantity.PATTERN:
        return Quantity.EXPECTED
    if "properties" in schema:
        return "section"
    if "items" in schema:
        alone = f"`{schema['pattern'].strip('^()$')}`, or a " if OPEN in schema else ""
        return f"{alone}list, each {_kind(schema['items'])}"
    if "additionalProperties" in schema:
        return f"by name, each {_kind(schema['additionalProperties'])}"
    return "as Kubernetes has it" if OPEN in schema else ", ".join([schema["type"], *_bounds(schema)])


def _bounds(schema: Schema) -> Iterator[str]:
    for bound, exclusive, over, at in (
        ("minimum", "exclusiveMinimum", "more than", "at least"),
        ("maximum", "exclusiveMaximum", "less than", "at most"),
    ):
        if bound in schema:
            yield f"{over if exclusive in schema else at} {schema[bound]}"


def _messages(schema: Schema) -> list[str]:
    return [rule["message"] for rule in schema.get(VALIDATIONS, ())]


def _rules(section: Schema, path: str = "") -> Iterator[str]:
    """What spans fields, and what is asked of a text, as sentences that begin with the field."""
    for rule in section.get(VALIDATIONS, ()):
        field = f"{path}{rule.get('fieldPath', '')}".lstrip(".")
        if not rule["message"].startswith("expected "):
            yield f"`{field}`: {rule['message']}"
    for name, field in section.get("properties", {}).items():
        yield from _rules(field, f"{path}.{name}")


def _with_examples(page: str) -> str:
    """A command's help with its examples as blocks of commands."""
    paragraphs = page.replace("```console\n$ ", "```\n").split("\n\n")  # usage is no command
    for number, paragraph in enumerate(paragraphs):
        found = re.fullmatch(r"(?:Examples?: )?((?:[A-Z_]+=\S+ )?spotune .*)", paragraph, re.DOTALL)
        if found:
            lines = "".join(f"$ {' '.join(line.split())}\n" for line in found[1].split("; "))
            paragraphs[number] = f"```console\n{lines}```"
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    _PAGES.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
