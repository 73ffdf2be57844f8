"""The CustomResourceDefinitions: current, small, structural, described, with the models' defaults and bounds."""

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

from spotune.crd import CUSTOM_RESOURCES, custom_resource_definition
from spotune.crd.structural_schema import INT_OR_STRING, PRESERVE_UNKNOWN_FIELDS, VALIDATIONS, structural_schema
from spotune.custom_resource.base import Section
from spotune.job import FinetuneJobSpec
from spotune.job.dataset import ColumnTemplate
from spotune.job_file.load import load_resource, read_document_of_kind
from spotune.service import ModelServiceSpec
from tests import ROOT
from tests.api.support.job_files import FULL_JOB_FILE, JOB_FILE
from tests.api.support.service_files import FULL_SERVICE_FILE, SERVICE_FILE
from tests.api.support.sweep_files import FULL_SWEEP_FILE, SWEEP_FILE
from tests.command_line import run_spotune

MANIFEST = ROOT / "manifests" / "crd.yaml"
EXAMPLE = ROOT / "examples" / "text-to-sql" / "finetunejob.yaml"
KEYWORDS = {
    *("type", "description", "default", "enum", "format", "pattern", "required", "properties", "additionalProperties"),
    *(
        "items",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
    ),
    *(INT_OR_STRING, PRESERVE_UNKNOWN_FIELDS, VALIDATIONS, "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
}
Schema = dict[str, Any]


KINDS = {resource.kind: resource for resource in CUSTOM_RESOURCES}
VERSIONS: dict[str, Schema] = {
    kind: custom_resource_definition(resource)["spec"]["versions"][0] for kind, resource in KINDS.items()
}
SCHEMAS: dict[str, Schema] = {kind: version["schema"]["openAPIV3Schema"] for kind, version in VERSIONS.items()}
JOB, SERVICE, SWEEP = SCHEMAS["FinetuneJob"], SCHEMAS["ModelService"], SCHEMAS["FinetuneSweep"]

UNTYPED = {
    ".spec.execution.gradientCheckpointing",
    ".spec.execution.offloadActivations",
    ".spec.execution.compile",
    ".spec.checkpoint.peerCopy",
    ".spec.adapter.lora.targetModules",
}
"""Fields of a job that are a text or something else."""
MAPPINGS = {
    *(".spec.workers.podTemplate", ".spec.head.podTemplate"),
    *(".spec.serving.podTemplate", ".spec.serving.gateway.podTemplate"),
    ".spec.training.config",
}
"""Fields of a job that take any mapping."""

of_every_kind = pytest.mark.parametrize("kind", KINDS)


def all_schemas(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """The schema of a field and of all fields in it with their paths, such as ``.spec.dataset.keep[]``."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from all_schemas(field, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from all_schemas(schema[keyword], f"{path}[]")


def at(path: str, schema: Schema) -> Schema:
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
    if isinstance(content, list) and "items" in schema:
        return [with_defaults(item, schema["items"]) for item in content]
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


@of_every_kind
def test_a_definition_is_small_enough_for_any_way_to_apply_it(kind: str) -> None:
    """In JSON, as the API server stores it. The annotation of `kubectl apply` holds at most 262,144 bytes."""
    assert len(json.dumps(custom_resource_definition(KINDS[kind]), separators=(",", ":"))) < 196_608


def test_the_manifest_holds_a_document_for_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    documents = list(yaml.safe_load_all(run_crd(capsys)))
    assert [document["metadata"]["name"] for document in documents] == [
        "finetunejobs.spotune.dev",
        "modelservices.spotune.dev",
        "finetunesweeps.spotune.dev",
    ]
    assert [document["spec"]["names"]["shortNames"] for document in documents] == [["ftj"], ["ms"], ["ftsweep"]]


def test_json_is_a_list_that_kubectl_applies_with_the_content_of_the_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run_crd(capsys, "--output", "json"))
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    assert found["items"] == list(yaml.safe_load_all(run_crd(capsys)))


def test_help_shows_how_to_apply_the_definition(capsys: pytest.CaptureFixture[str]) -> None:
    assert "spotune crd | kubectl apply" in run_crd(capsys, "--help")


@of_every_kind
def test_every_field_of_the_models_is_in_it_and_described(kind: str) -> None:
    def fields(section: type[BaseModel], path: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield f"{path}.{field.alias or name}"
            inner = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
            for model in inner:
                if issubclass(model, BaseModel):
                    yield from fields(model, f"{path}.{field.alias}")

    schemas = list(all_schemas(SCHEMAS[kind]))
    expected = {path for path in fields(KINDS[kind].model, "") if not path.startswith(".metadata.")}
    named = {path.replace("[]", ""): schema for path, schema in schemas if path and not path.endswith("[]")}
    assert set(named) == expected
    assert [path for path, schema in named.items() if path != ".metadata" and not schema.get("description")] == []


@of_every_kind
def test_it_has_only_what_a_structural_schema_may_have(kind: str) -> None:
    found = {path: set(schema) - KEYWORDS for path, schema in all_schemas(SCHEMAS[kind])}
    assert {path: keywords for path, keywords in found.items() if keywords} == {}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (JOB, UNTYPED),
        (SERVICE, set()),
        (SWEEP, {f".spec.template{path}" for path in UNTYPED} | {".spec.parameters[].values[]"}),
    ],
    ids=KINDS,
)
def test_every_schema_has_a_type_or_a_substitute_for_it(schema: Schema, expected: set[str]) -> None:
    untyped = {path: found for path, found in all_schemas(schema) if "type" not in found and INT_OR_STRING not in found}
    assert set(untyped) == expected
    values = {".spec.parameters[].values[]"}
    assert all("enum" in found or "items" in found for path, found in untyped.items() if path not in values)


@pytest.mark.parametrize(
    ("schema", "templates"),
    [
        (JOB, MAPPINGS),
        (SERVICE, {".spec.podTemplate", ".spec.gateway.podTemplate"}),
        (
            SWEEP,
            {
                *(f".spec.template{path}" for path in MAPPINGS),
                *(".status.best.parameters", ".status.trials[].parameters"),
            },
        ),
    ],
    ids=KINDS,
)
def test_only_pod_templates_arguments_and_recorded_parameters_take_any_mapping(
    schema: Schema, templates: set[str]
) -> None:
    found = {
        path for path, each in all_schemas(schema) if each.get("type") == "object" and PRESERVE_UNKNOWN_FIELDS in each
    }
    assert found == templates


@of_every_kind
def test_a_list_with_keys_holds_sections_that_have_them(kind: str) -> None:
    """The API server merges such a list by the keys, and refuses items with the same ones."""
    lists = {path: schema for path, schema in all_schemas(SCHEMAS[kind]) if "x-kubernetes-list-map-keys" in schema}
    assert ".status.conditions" in lists
    assert (".spec.adapters" in lists) == (kind == "ModelService")
    for schema in lists.values():
        assert schema["x-kubernetes-list-type"] == "map"
        assert set(schema["x-kubernetes-list-map-keys"]) <= set(schema["items"]["required"])


def test_an_unsupported_union_stops_the_generator() -> None:
    class Odd(Section):
        """A section."""

        number: int | dict[str, str] = 1
        """A number or a mapping."""

    with pytest.raises(NotImplementedError, match="union of integer, object"):
        structural_schema(Odd, {})


@pytest.mark.parametrize(
    "text",
    [JOB_FILE, FULL_JOB_FILE, EXAMPLE.read_text(), SERVICE_FILE, FULL_SERVICE_FILE, SWEEP_FILE, FULL_SWEEP_FILE],
    ids=["small-job", "full-job", "text-to-sql", "small-service", "full-service", "small-sweep", "full-sweep"],
)
def test_defaults_are_those_of_the_models(text: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    loaded = load_resource(file)
    spec = with_defaults(read_document_of_kind(file, *KINDS).content["spec"], at(".spec", SCHEMAS[loaded.kind]))
    validated = type(loaded.spec).model_validate(spec)
    assert validated == loaded.spec
    assert validated.model_dump(exclude_unset=True) == loaded.spec.model_dump(exclude_none=True)


@of_every_kind
def test_the_default_status_is_not_observed_yet(kind: str) -> None:
    schemas = all_schemas(at(".status", SCHEMAS[kind]))
    assert {path: schema["default"] for path, schema in schemas if "default" in schema} == {
        "": {"observedGeneration": -1}
    }


@pytest.mark.parametrize(
    ("kind", "columns", "wide"),
    [
        ("FinetuneJob", ["Phase", "Step", "Loss", "ETA", "Workers", "Restarts", "Checkpoint", "Age"], []),
        (
            "ModelService",
            ["Phase", "Replicas", "Model", "Requests/s", "First token (ms)", "URL", "Age"],
            ["Location", "RayService", "Image"],
        ),
        (
            "FinetuneSweep",
            ["Phase", "Running", "Complete", "Pruned", "Failed", "Waiting", "Best", "Value", "GPU hours", "Age"],
            [],
        ),
    ],
)
def test_columns_show_fields_that_exist(kind: str, columns: list[str], wide: list[str]) -> None:
    found = {column["name"]: column for column in VERSIONS[kind]["additionalPrinterColumns"]}
    assert list(found) == [*columns, *wide]
    assert [name for name, column in found.items() if column.get("priority", 0)] == wide
    del found["Age"]
    assert [at(column["jsonPath"], SCHEMAS[kind])["type"] for column in found.values()] == [
        column["type"] for column in found.values()
    ]


@pytest.mark.parametrize(("kind", "count"), [("FinetuneJob", 50), ("ModelService", 15), ("FinetuneSweep", 70)])
def test_rules_name_existing_fields_and_have_a_remedy(kind: str, count: int) -> None:
    rules = [(schema, rule) for _, schema in all_schemas(SCHEMAS[kind]) for rule in schema.get(VALIDATIONS, [])]
    assert len(rules) > count
    for schema, rule in rules:
        assert at(rule.get("fieldPath", ""), schema)
        assert len(rule["message"].split()) > 3


@of_every_kind
def test_rules_take_no_sum_of_a_list_whose_length_kubernetes_1_29_cannot_estimate(kind: str) -> None:
    rules = [rule["rule"] for _, schema in all_schemas(SCHEMAS[kind]) for rule in schema.get(VALIDATIONS, [])]
    of_unknown_length = re.compile(r"\.(map|filter|split)\(.*\)\.(sum|min|max|indexOf|join)\(")
    assert [rule for rule in rules if of_unknown_length.search(rule)] == []


def test_the_rules_of_a_template_are_the_models_own() -> None:
    rules = at(".spec.dataset.prompt", JOB)[VALIDATIONS]
    patterns = [
        re.compile(found.group(1)) for rule in rules if (found := re.search(r"matches\(r'(.*)'\)", rule["rule"]))
    ]
    assert len(patterns) == len(rules)
    model = TypeAdapter[str](ColumnTemplate)
    for length in range(1, 8):
        for characters in itertools.product("{}a", repeat=length):
            template = "".join(characters)
            assert all(pattern.search(template) for pattern in patterns) == is_valid(model, template), template


RULE_OF_A_PATTERN = re.compile(r"self\.matches\(r'(\^.*\$)'\)")


def leaves(section: type[BaseModel], schema: Schema, path: str) -> Iterator[Any]:
    """(path, Python type with its bounds, schema) of every field that is no section and has no rule but a pattern."""
    for field in section.model_fields.values():
        place, found = f"{path}.{field.alias}", schema["properties"][field.alias]
        parts = (field.annotation, *get_args(field.annotation))
        models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        rules = found.get(VALIDATIONS, [])
        if models:
            yield from leaves(models[0], found.get("items", found), place)
        elif "pattern" not in found and all(RULE_OF_A_PATTERN.fullmatch(rule["rule"]) for rule in rules):
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
        rules = [RULE_OF_A_PATTERN.fullmatch(rule["rule"]) for rule in schema.get(VALIDATIONS, [])]
        return len(value) <= schema.get("maxLength", len(value)) and all(re.fullmatch(r[1], value) for r in rules if r)
    if isinstance(value, list):
        fits: bool = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(allows(schema["items"], item) for item in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        excluded = [low] if schema.get("exclusiveMinimum") else []
        excluded += [high] if schema.get("exclusiveMaximum") else []
        limits = [float(rule["rule"].removeprefix("self < ")) for rule in schema.get(VALIDATIONS, [])]
        return bool(low <= value <= high) and value not in excluded and all(value < limit for limit in limits)
    return True


def test_no_bound_between_whole_numbers_is_exclusive() -> None:
    """The API server would compare the default 0 with the bound cut to a whole number, and refuse the definition."""
    for schema in SCHEMAS.values():
        for path, field in all_schemas(schema):
            for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
                assert exclusive not in field or float(field[bound]).is_integer(), path


NUMBERS = [-1, 0, 1, 2, 3, 4, 2**32 - 1, 2**32, -0.5, 0.5, 0.999, 1.5]
ENUMS = {str(value) for schema in SCHEMAS.values() for _, each in all_schemas(schema) for value in each.get("enum", [])}
TEXTS = [
    *("", "some", "true", "30s", "1h30m", "30", "5 m", "a/b", "../a", "a/..", "/", "a..", "x" * 1024),
    *("x" * 1025, "hf://a/b", "hf://a/b/c", "s3://a/b", "a b", "a:1", "redis.svc:6379", "a.b", "A-b", "-a", "a" * 253),
    *sorted(ENUMS),
]
LISTS: list[Any] = [
    *([], ["loss"], ["some"], [1], ["loss", "exactMatch"], ["loss", "my.metrics:bleu"], ["_a:b1"], ["loss"] * 17),
    *([f"a:{'b' * 198}"], [f"a:{'b' * 199}"], [".a:b"], ["a.:b"], ["a:"], [":b"], ["a:b.c"], ["a:b:c"], ["a:b\n"]),
    *([" a:b"], ["1a:b"], ["a-b:c"], ["ä:b"], ["loss:x"], ["a:loss"]),
]


@pytest.mark.parametrize(
    ("field", "schema"),
    [
        *leaves(FinetuneJobSpec, at(".spec", JOB), "FinetuneJob.spec"),
        *leaves(ModelServiceSpec, at(".spec", SERVICE), "ModelService.spec"),
    ],
)
def test_a_field_accepts_the_same_values_as_the_model(field: Any, schema: Schema) -> None:
    model = TypeAdapter[Any](field, config={"strict": True})
    values = [*NUMBERS, *TEXTS, *LISTS, True, False]
    assert [value for value in values if is_valid(model, value)] == [value for value in values if allows(schema, value)]
