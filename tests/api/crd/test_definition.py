"""The CustomResourceDefinition: current, small, structural, described, with the models' defaults and bounds."""

import copy
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from spotune.crd import custom_resource_definition
from spotune.crd.structural_schema import INT_OR_STRING, PRESERVE_UNKNOWN_FIELDS, VALIDATIONS, structural_schema
from spotune.job import FinetuneJob, FinetuneJobSpec
from spotune.job.base import Section
from spotune.job.dataset import ColumnTemplate
from spotune.job_file.load import load_job, read_job_file
from tests import ROOT
from tests.api.support.job_files import FULL_JOB_FILE, JOB_FILE
from tests.command_line import run_spotune

MANIFEST = ROOT / "manifests" / "crd.yaml"
EXAMPLE = ROOT / "examples" / "text-to-sql" / "finetunejob.yaml"
KEYWORDS = {
    *("type", "description", "default", "enum", "format", "pattern", "required", "properties", "additionalProperties"),
    *("items", "minItems", "maxItems", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *(INT_OR_STRING, PRESERVE_UNKNOWN_FIELDS, VALIDATIONS, "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
}
VERSION = custom_resource_definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]

Schema = dict[str, Any]


def all_schemas(schema: Schema = SCHEMA, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema in the definition with its path, such as ``.spec.dataset.keep[]``."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from all_schemas(field, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from all_schemas(schema[keyword], f"{path}[]")


def at(path: str, schema: Schema = SCHEMA) -> Schema:
    """The schema of a field by its path, such as ``.spec.dataset``."""
    for name in path.split(".")[1:]:
        schema = schema["properties"][name]
    return schema


def with_defaults(content: Any, schema: Schema) -> Any:
    """Fill in defaults as the API server does, from the outside to the inside."""
    if isinstance(content, dict) and "properties" in schema:
        fields = schema["properties"]
        missing = {name: field["default"] for name, field in fields.items() if "default" in field}
        filled = copy.deepcopy(missing) | content
        return {name: with_defaults(value, fields[name]) for name, value in filled.items()}
    return content


def is_valid(model: TypeAdapter[Any], value: Any) -> bool:
    try:
        model.validate_python(value)
    except ValidationError:
        return False
    return True


def run_crd(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, out, _ = run_spotune(capsys, "crd", *words)
    assert code == 0
    return out


def test_the_committed_manifest_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_crd(capsys) == MANIFEST.read_text(), "run `make manifests` and commit what it writes"


def test_the_manifest_is_small_enough_for_any_way_to_apply_it() -> None:
    assert MANIFEST.stat().st_size < 100_000


def test_json_and_yaml_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run_crd(capsys, "--output", "json")) == yaml.safe_load(run_crd(capsys))


def test_help_shows_how_to_apply_the_definition(capsys: pytest.CaptureFixture[str]) -> None:
    assert "spotune crd | kubectl apply" in run_crd(capsys, "--help")


def test_every_field_of_the_models_is_in_it_and_described() -> None:
    def fields(section: type[BaseModel], path: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield f"{path}.{field.alias or name}"
            inner = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
            for model in inner:
                if issubclass(model, BaseModel):
                    yield from fields(model, f"{path}.{field.alias}")

    expected = {path for path in fields(FinetuneJob, "") if not path.startswith(".metadata.")}
    named = {path.replace("[]", ""): schema for path, schema in all_schemas() if path and not path.endswith("[]")}
    assert set(named) == expected
    assert [path for path, schema in named.items() if path != ".metadata" and not schema.get("description")] == []


def test_it_has_only_what_a_structural_schema_may_have() -> None:
    assert {path: set(schema) - KEYWORDS for path, schema in all_schemas() if set(schema) - KEYWORDS} == {}


def test_every_schema_has_a_type_or_a_substitute_for_it() -> None:
    untyped = {path for path, schema in all_schemas() if "type" not in schema and INT_OR_STRING not in schema}
    assert untyped == {
        ".spec.execution.gradientCheckpointing",
        ".spec.execution.compile",
        ".spec.adapter.lora.targetModules",
    }
    assert all("enum" in at(path) or "items" in at(path) for path in untyped)


def test_only_pod_templates_take_any_mapping() -> None:
    open_mappings = {
        path for path, schema in all_schemas() if schema.get("type") == "object" and PRESERVE_UNKNOWN_FIELDS in schema
    }
    assert open_mappings == {".spec.workers.podTemplate", ".spec.head.podTemplate"}


def test_an_unsupported_union_stops_the_generator() -> None:
    class Odd(Section):
        """A section."""

        number: int | dict[str, str] = 1
        """A number or a mapping."""

    with pytest.raises(NotImplementedError, match="union of integer, object"):
        structural_schema(Odd, {})


@pytest.mark.parametrize("text", [JOB_FILE, FULL_JOB_FILE, EXAMPLE.read_text()], ids=["small", "full", "text-to-sql"])
def test_defaults_are_those_of_the_models(text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    job = load_job(file)
    spec = with_defaults(read_job_file(file).content["spec"], at(".spec"))
    assert FinetuneJobSpec.model_validate(spec) == job.spec
    in_full = FinetuneJobSpec.model_validate(spec).model_dump(exclude_unset=True)
    assert in_full == job.spec.model_dump(exclude_none=True)


def test_the_default_status_is_not_observed_yet() -> None:
    defaults = {path: schema["default"] for path, schema in all_schemas(at(".status")) if "default" in schema}
    assert defaults == {"": {"observedGeneration": -1}}


def test_columns_show_fields_that_exist() -> None:
    columns = {column["name"]: column for column in VERSION["additionalPrinterColumns"]}
    assert list(columns) == ["Phase", "Step", "Loss", "ETA", "Workers", "Restarts", "Checkpoint", "Age"]
    del columns["Age"]
    assert [at(column["jsonPath"])["type"] for column in columns.values()] == [
        column["type"] for column in columns.values()
    ]


def test_rules_name_existing_fields_and_have_a_remedy() -> None:
    rules = [(schema, rule) for _, schema in all_schemas() for rule in schema.get(VALIDATIONS, [])]
    assert len(rules) > 50
    for schema, rule in rules:
        assert at(rule.get("fieldPath", ""), schema)
        assert len(rule["message"].split()) > 3


def test_the_rules_of_a_template_are_the_models_own() -> None:
    rules = at(".spec.dataset.prompt")[VALIDATIONS]
    patterns = [
        re.compile(found.group(1)) for rule in rules if (found := re.search(r"matches\(r'(.*)'\)", rule["rule"]))
    ]
    assert len(patterns) == len(rules)
    model = TypeAdapter[str](ColumnTemplate)
    for length in range(1, 8):
        for characters in itertools.product("{}a", repeat=length):
            template = "".join(characters)
            assert all(pattern.search(template) for pattern in patterns) == is_valid(model, template), template


def leaves(section: type[BaseModel], schema: Schema, path: str) -> Iterator[Any]:
    """(path, Python type with its bounds, schema) of every field that is not a section and has no CEL rule."""
    for field in section.model_fields.values():
        place, found = f"{path}.{field.alias}", schema["properties"][field.alias]
        parts = (field.annotation, *get_args(field.annotation))
        models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if models:
            yield from leaves(models[0], found, place)
        elif VALIDATIONS not in found and "pattern" not in found:
            yield pytest.param(Annotated[field.annotation, Field(), *field.metadata], found, id=place)


def allows(schema: Schema, value: Any) -> bool:
    """Whether a schema allows a value in Kubernetes. Of its CEL rules, only string comparisons are evaluated."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    kind = kinds[type(value)]
    allowed = {schema.get("type", kind)} | ({"integer"} if schema.get("type") == "number" else set())
    allowed = {"integer", "string"} if INT_OR_STRING in schema else allowed
    if kind not in allowed or ("enum" in schema and (type(value), value) not in [(type(v), v) for v in schema["enum"]]):
        return False
    if isinstance(value, str):
        rules = [re.fullmatch(r"self\.matches\(r'(.*)'\)", rule["rule"]) for rule in schema.get(VALIDATIONS, [])]
        return len(value) <= schema.get("maxLength", len(value)) and all(re.fullmatch(r[1], value) for r in rules if r)
    if isinstance(value, list):
        fits: bool = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(allows(schema["items"], item) for item in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        excluded = [low] if schema.get("exclusiveMinimum") else []
        excluded += [high] if schema.get("exclusiveMaximum") else []
        return bool(low <= value <= high) and value not in excluded
    return True


NUMBERS = [-1, 0, 1, 2, 3, 4, 2**32 - 1, 2**32, -0.5, 0.5, 0.999, 1.5]
TEXTS = ["", "some", "true", *sorted({str(value) for _, schema in all_schemas() for value in schema.get("enum", [])})]
LISTS: list[Any] = [
    *([], ["loss"], ["some"], [1], ["loss", "exactMatch"], ["loss", "my.metrics:bleu"], ["_a:b1"], ["loss"] * 17),
    *([f"a:{'b' * 198}"], [f"a:{'b' * 199}"], [".a:b"], ["a.:b"], ["a:"], [":b"], ["a:b.c"], ["a:b:c"], ["a:b\n"]),
    *([" a:b"], ["1a:b"], ["a-b:c"], ["ä:b"], ["loss:x"], ["a:loss"]),
]


@pytest.mark.parametrize(("field", "schema"), [*leaves(FinetuneJobSpec, at(".spec"), ".spec")])
def test_a_field_accepts_the_same_values_as_the_model(field: Any, schema: Schema) -> None:
    model = TypeAdapter[Any](field, config={"strict": True})
    values = [*NUMBERS, *TEXTS, *LISTS, True, False]
    assert [value for value in values if is_valid(model, value)] == [value for value in values if allows(schema, value)]
