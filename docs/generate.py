"""Writes the pages of docs/reference from the models that check a job and from the help of the command line.

Run by `make manifests`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from docs.wrapping import wrap_command, wrap_page
from spotune.cli.main import command_line
from spotune.crd.cel_rules import single_rules
from spotune.crd.job_rules import JOB_RULES
from spotune.crd.service_rules import SERVICE_RULES
from spotune.crd.structural_schema import PRESERVE_UNKNOWN_FIELDS, VALIDATIONS, Schema, structural_schema
from spotune.crd.sweep_rules import SWEEP_RULES
from spotune.job import FinetuneJob
from spotune.service import ModelService
from spotune.sweep import FinetuneSweep
from spotune.units.quantities import Quantity

_ROOT = Path(__file__).parent.parent
_PAGES = _ROOT / "docs/reference"
_EXAMPLE = "examples/text-to-sql/finetunejob.yaml"
_JOB_HEAD = """# FinetuneJob

Every field of a FinetuneJob, with its type, its default and when it may change. This page is generated from the models
that check a job (`make manifests`). `spotune validate` and the API server refuse anything else with a message that
names the field. For an unknown name the message suggests the nearest valid one.

A job that trains on one machine ([{example}](../../{example})):

```yaml
{job}```

"""
_FROZEN = """Once there is a checkpoint, a *frozen* field cannot change, and a field that *may grow* can only grow:
the API server refuses anything else. All other fields may change at any time;
[the operator](../operator.md#changing-a-running-job) describes what happens then.
`spotune run` is less strict: `training.evaluation` and `training.maxBadSteps` may change, because they
are no part of [what is trained](../concepts.md#meaning-and-execution).

"""
_SERVICE_HEAD = """# ModelService

Every field of a ModelService, with its type and its default. This page is generated from the models that check a
service (`make manifests`). `spotune validate` and the API server refuse anything else with a message that names the
field. For an unknown name the message suggests the nearest valid one. All fields may change at any time.

A service for the model of a FinetuneJob, on one to three spot GPUs:

```yaml
{service}```

`kubectl get ms` shows phase, replicas, version of the model, requests per second, the median time to the first token
and URL; with `--output wide` also where the model is.

"""
SERVICE = """apiVersion: spotune.dev/v1alpha1
kind: ModelService
metadata:
  name: text-to-sql
spec:
  model:
    finetuneJob: text-to-sql
  replicas: {min: 1, max: 3}
"""
"""The example of the page on ModelServices."""
_SWEEP_HEAD = """# FinetuneSweep

Every field of a FinetuneSweep, with its type and its default. This page is generated from the models that check a sweep
(`make manifests`). `spotune validate` and the API server refuse anything else with a message that names the field.
[Search for hyperparameters](../how-to/sweep.md) shows how to use it.

Twelve trials of a FinetuneJob, four at a time:

```yaml
{sweep}```

`kubectl get ftsweep` shows the phase, the number of trials in each state, the best trial with its value, and GPU hours.
The name of a sweep has at most 36 characters, because its trials are named `<sweep>-<number>`.

"""
SWEEP = """apiVersion: spotune.dev/v1alpha1
kind: FinetuneSweep
metadata:
  name: t5-search
spec:
  parameters:
    training.learningRate: {logUniform: [1.0e-5, 1.0e-3]}
    training.globalBatchSize: {values: [32, 64]}
  search: {algorithm: tpe, trials: 12}
  objective: {metric: loss}
  earlyStopping: {algorithm: asha, minSteps: 200}
  maxConcurrent: 4
  template:
    spec:
      model: {source: "hf://google-t5/t5-large", task: seq2seq}
      dataset:
        train: {source: "s3://bucket/shards"}
        eval: {fraction: 0.1}
        prompt: "{question}"
        completion: "{sql}"
      training: {epochs: 3, evaluation: {everySteps: 100}}
"""
"""The example of the page on FinetuneSweeps."""
_SECRETS = """## Secrets on one machine

On a cluster the operator turns Secrets into environment variables of the pods. `spotune run` reads the same variables
from its own environment, and names the one that is missing. `suspend` works on a cluster only.
"""
_COMMANDS_HEAD = r"""# The command line

What each command does, its options, and what its exit code means. The options are those of `--help` (`make manifests`
writes this page). `spotune --version` prints the version. `--output json` prints JSON for scripts, errors included.

| on one machine | |
|---|---|
| `spotune init ROWS --model MODEL` | write a job file for rows and a model |
| `spotune data show\|stats` | a row as the model sees it; how long rows are in tokens |
| `spotune validate FILE.yaml...` | check files of all kinds: fields, values, what goes together, trials, raw rows |
| `spotune plan JOB.yaml` | memory, layout, step time and checkpoint interval per number of workers |
| `spotune simulate TRACE.csv` | goodput, cost and finishing time on a spot trace, for choices of workers and head |
| `spotune shard INPUT... --directory DIR` | JSON lines, CSV or Parquet to tokenized MDS shards |
| `spotune run JOB.yaml --directory DIR` | train on this machine, or continue a run |
| `spotune predict DIR "question"` | answer with the trained model |
| `spotune serve DIR` | answer requests with the trained model: OpenAI's API and a page |
| `spotune checkpoint ls\|verify\|export DIR` | list, verify or export the checkpoints of a run |
| `spotune checkpoint convert DIR --to\|--from FOLDER` | write DeepSpeed's universal format, or start a run from it |
| `spotune report DIR` | a run as one HTML page |

| on a cluster | |
|---|---|
| `spotune doctor` | whether the cluster fits jobs and services, what is missing, and how to mend it |
| `spotune status [NAME]`, `spotune watch NAME` | the state of jobs and services; one job until it has ended |
| `spotune fleet` | GPU hours, cost, goodput and waste of all jobs by team |
| `spotune sweep NAME` | the trials of a FinetuneSweep, the best first; `--report FILE` writes a page |
| `spotune logs NAME --follow` | logs of a job, drivers and workers of all attempts, or of a service |
| `spotune events NAME` | Kubernetes Events of a job or service and its pods |
| `spotune suspend NAME`, `spotune resume NAME` | commit and give the nodes back; continue from there |
| `spotune report NAME`, `spotune tensorboard NAME` | a job as one HTML page; its curves in the browser |

| inside a cluster, and for its administrator | |
|---|---|
| `spotune operator` | run the operator |
| `spotune supervise JOB.yaml --directory DIR` | the supervisor container of a head pod |
| `spotune crd` | print the CustomResourceDefinitions |
| `spotune render FILE.yaml --provider aks` | print the objects that the operator applies for a job, service or sweep |

## Exit codes

| exit code | meaning | what to do |
|---|---|---|
| 0 | trained and exported, or the command did what it should | |
| 2 | the command line is wrong | read the message |
| 10 | infrastructure: machine, network, storage, or the run was asked to stop | run the same command again |
| 20 | the job's model, data or configuration is wrong | change what the message names |
| 30 | a later start of the same job has taken over | leave it alone |
| 130 | Ctrl-C, of a command that watches a cluster | |

"""


def finetune_job() -> str:
    """Returns the page on every field of a FinetuneJob."""
    rules = {section: tuple(single_rules(combined)) for section, combined in JOB_RULES.items()}
    schema = structural_schema(FinetuneJob, rules)
    example = (_ROOT / _EXAMPLE).read_text(encoding="utf-8")
    spec = schema["properties"]["spec"]
    changes = {
        rule.field.removeprefix("spec."): "may grow" if "grow" in rule.message else "frozen"
        for rule in rules[FinetuneJob]
        if rule.reason == "FieldValueForbidden"
    }
    page = _JOB_HEAD.format(example=_EXAMPLE, job=example[example.index("apiVersion") :])
    page += _metadata(schema) + f"## spec\n\n{spec['description']}\n\n{_FROZEN}{_sections(spec)}"
    return page + _pages_of_sections(spec, changes) + _status(schema) + _SECRETS


def model_service() -> str:
    """Returns the page on every field of a ModelService."""
    schema = structural_schema(ModelService, SERVICE_RULES)
    spec = schema["properties"]["spec"]
    spec[VALIDATIONS] += [
        rule | {"fieldPath": rule["fieldPath"].removeprefix(".spec")}
        for rule in schema[VALIDATIONS]
        if rule.get("fieldPath", "").startswith(".spec.")
    ]
    sections = {name: field for name, field in spec["properties"].items() if _fields(field)}
    others = {name: field for name, field in spec["properties"].items() if name not in sections}
    page = _SERVICE_HEAD.format(service=SERVICE) + _metadata(schema) + f"## spec\n\n{spec['description']}\n\n"
    page += _sections(spec | {"properties": sections}) + _table({"properties": others}, {})
    page += _also_refused(spec, *others)
    return page + _pages_of_sections(spec, {}) + _status(schema)


def finetune_sweep() -> str:
    """Returns the page on every field of a FinetuneSweep; those of its template are on the page of FinetuneJobs."""
    schema = structural_schema(FinetuneSweep, SWEEP_RULES)
    spec = schema["properties"]["spec"]
    fields = spec["properties"]
    template, parameters = fields.pop("template"), fields["parameters"]
    values = parameters["additionalProperties"]["properties"]["values"]
    values[VALIDATIONS] = [{"rule": "true", "message": "expected a list of texts, numbers and booleans"}]
    fields["parameters"] = parameters["additionalProperties"] | {"description": parameters["description"]}
    others = {name: field for name, field in fields.items() if not _fields(field)}
    page = _SWEEP_HEAD.format(sweep=SWEEP) + _metadata(schema) + f"## spec\n\n{spec['description']}\n\n"
    page += _sections(spec | {"properties": fields | {"template": template}}).replace("#template", "#the-template")
    page += _table({"properties": {name: field for name, field in others.items() if name != "template"}}, {})
    page += _pages_of_sections(spec, {})
    page += f"## The template\n\n{template['description']} `template.spec` is [the spec of a FinetuneJob]"
    page += f"(finetunejob.md#spec).\n\n{_also_refused(spec, 'template')}"
    return page + _status(schema)


def commands() -> str:
    """The page about all commands and options."""
    group = command_line()
    context = typer.Context(group, info_name="spotune")
    pages = [
        get_docs_for_click(obj=command, ctx=context, indent=1, name=name, call_prefix="spotune")
        for name, command in group.commands.items()
    ]
    return _COMMANDS_HEAD + "".join(_with_examples(page) for page in pages).rstrip() + "\n"


def files() -> dict[Path, str]:
    """The generated pages by path."""
    pages = {
        "finetunejob.md": finetune_job(),
        "modelservice.md": model_service(),
        "finetunesweep.md": finetune_sweep(),
        "command-line.md": commands(),
    }
    return {_PAGES / name: wrap_page(page) for name, page in pages.items()}


def _metadata(schema: Schema) -> str:
    return "## metadata\n\n" + _table(schema["properties"]["metadata"], {})


def _status(schema: Schema) -> str:
    status = schema["properties"]["status"]
    return f"## status\n\n{status['description']}\n\n" + _table(status, {}, defaults=False)


def _pages_of_sections(spec: Schema, changes: Mapping[str, str]) -> str:
    """A heading and a table for every section of a spec, with what the API server refuses besides."""
    page = ""
    for name, section in spec["properties"].items():
        if fields := _fields(section):
            path = name if fields is section else f"{name}[]"
            page += f"## {name}\n\n{section['description']}\n\n{_table(fields, changes, path)}"
            page += _also_refused(spec, name)
    return page


def _fields(field: Schema) -> Schema:
    """The schema with the fields of a section or of the items of a list of sections; empty for any other field."""
    items: Schema = field.get("items", {})
    return field if "properties" in field else items if "properties" in items else {}


def _also_refused(spec: Schema, *names: str) -> str:
    """The rules for some fields of a spec that the tables do not show."""
    rules = dict.fromkeys(text for name in names for text in _rules(spec) if re.match(rf"`{name}\b", text))
    lines = [f"- {text}\n" for text in rules]
    return f"Also refused:\n\n{''.join(lines)}\n" if rules else ""


def _sections(spec: Schema) -> str:
    lines = ["| section | |\n|---|---|\n"]
    for name, section in spec["properties"].items():
        shown = f"[`{name}`](#{name.lower()})" if _fields(section) else f"`{name}`"
        needed = "**required**: " if name in spec["required"] else ""
        lines.append(f"| {shown} | {needed}{section['description']} |\n")
    return "".join(lines) + "\n"


def _table(section: Schema, changes: Mapping[str, str], path: str = "", *, defaults: bool = True) -> str:
    """A table of a section's fields, including nested ones. It has a column for changes if any field restricts them."""
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
    """The type of a field, for display."""
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
        alone = f"`{schema['pattern'].strip('^()$')}`, or a " if PRESERVE_UNKNOWN_FIELDS in schema else ""
        return f"{alone}list, each {_kind(schema['items'])}"
    if "additionalProperties" in schema:
        return f"by name, each {_kind(schema['additionalProperties'])}"
    return (
        "as Kubernetes has it" if PRESERVE_UNKNOWN_FIELDS in schema else ", ".join([schema["type"], *_bounds(schema)])
    )


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
    """Messages of CEL rules that span several fields or check a string, each starting with the field."""
    for rule in section.get(VALIDATIONS, ()):
        field = f"{path}{rule.get('fieldPath', '')}".lstrip(".")
        if not rule["message"].startswith("expected "):
            yield f"`{field}`: {rule['message']}"
    for name, field in section.get("properties", {}).items():
        yield from _rules(field, f"{path}.{name}")
    if "properties" in section.get("items", {}):
        yield from _rules(section["items"], f"{path}[]")


def _with_examples(page: str) -> str:
    """A command's help with its examples as code blocks."""
    paragraphs = page.replace("```console\n$ ", "```\n").split("\n\n")  # the usage line is not an example
    for number, paragraph in enumerate(paragraphs):
        found = re.fullmatch(r"(?:Examples?: )?((?:[A-Z_]+=\S+ )?spotune .*)", paragraph, re.DOTALL)
        if found:
            lines = "".join(f"{wrap_command(f'$ {line}')}\n" for line in found[1].split("; "))
            paragraphs[number] = f"```console\n{lines}```"
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    _PAGES.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
