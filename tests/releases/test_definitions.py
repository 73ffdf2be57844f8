"""Everything that was valid under an earlier release's definitions is valid under today's, and means the same."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from spotune.crd import CUSTOM_RESOURCES, custom_resource_definition
from spotune.crd.cel_rules import Rule, single_rules
from spotune.custom_resource.metadata import LabelValue
from spotune.job import FinetuneJobStatus
from spotune.job_file.load import parse_job, parse_service
from spotune.job_file.yaml_file import Document
from spotune.service import ModelServiceStatus
from tests import ROOT
from tests.operator.support.crd_schema import violations
from tests.releases.definitions import Schema, narrowed, pruned, schemas, with_defaults
from tests.releases.release import Release, releases

RELEASES = pytest.mark.parametrize("release", releases(), ids=lambda release: release.name)
MODELS: dict[str, Any] = {"FinetuneJob": FinetuneJobStatus, "ModelService": ModelServiceStatus}
_NARROWED = {("before-v0.1.0", "cluster.queueName")}
"""Of what is not a release. No RayCluster could have a label of the values that are refused since then."""
_REWORDED = ("must not change after the first checkpoint", "is immutable after the first checkpoint")
"""Words of today's messages, and of those that mean the same in releases before v0.1.0."""
_NEW_RULE = re.compile(r"(?P<path>[^:]+): new rule (?P<rule>.*)", re.DOTALL)


@cache
def today() -> dict[str, Schema]:
    return schemas((ROOT / "manifests/crd.yaml").read_text())


def fields_below(schema: Schema) -> set[str]:
    """Names of all fields at any depth."""
    found = set()
    for name, field in schema.get("properties", {}).items():
        found |= {name} | fields_below(field)
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            found |= fields_below(schema[keyword])
    return found


def _is_label(value: str) -> bool:
    try:
        TypeAdapter(LabelValue).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def today_with_single_rules() -> dict[str, Schema]:
    """Today's definitions, but with the rules as they are before some are combined, as releases had them."""
    found: dict[str, Schema] = {}
    for resource in CUSTOM_RESOURCES:
        rules = {section: tuple(map(_as_released, single_rules(each))) for section, each in resource.rules.items()}
        [version] = custom_resource_definition(replace(resource, rules=rules))["spec"]["versions"]
        found[resource.kind] = version["schema"]["openAPIV3Schema"]
    return found


def _as_released(rule: Rule) -> Rule:
    return replace(rule, message=rule.message.replace(*_REWORDED))


@RELEASES
def test_no_field_is_gone_narrowed_or_has_another_default(release: Release) -> None:
    """A new rule is allowed if it reads a new field: objects of the release do not have it."""
    refused = []
    for kind, old in release.schemas.items():
        new_fields = fields_below(today()[kind]) - fields_below(old)
        for change in narrowed(old, today_with_single_rules()[kind], kind):
            rule = _NEW_RULE.fullmatch(change)
            if (release.name, ".".join(change.partition(":")[0].split(".")[-2:])) in _NARROWED:
                continue
            if rule is None or not new_fields & set(re.findall(r"\w+", rule["rule"])):
                refused.append(change)
    assert refused == []


@RELEASES
def test_objects_that_the_release_accepted_are_accepted_and_mean_the_same(release: Release) -> None:
    kinds = {body["kind"] for body in release.valid}
    assert kinds == MODELS.keys()
    for body in [*release.valid, *(found["body"] for found in release.objects)]:
        schema = today()[body["kind"]]
        stored = with_defaults(body, release.schemas[body["kind"]])
        served = with_defaults(stored, schema)
        if release.name == "before-v0.1.0" and not _is_label(body["spec"].get("cluster", {}).get("queueName", "")):
            continue
        assert pruned(served, schema) == served
        parse = parse_job if body["kind"] == "FinetuneJob" else parse_service
        # The defaults of the definition are those of the models, and those of the release.
        assert parse(Document(content=served)).spec == parse(Document(content=body)).spec
        assert pruned(served, release.schemas[body["kind"]]) == stored  # a rollback finds what was there


@RELEASES
def test_statuses_of_the_release_are_read_and_todays_can_be_read_by_it(release: Release) -> None:
    """A rollback restores the older definition, which prunes what it does not know."""
    for found in release.objects:
        kind, status = found["body"]["kind"], found["status"]
        read = MODELS[kind].model_validate(status)
        written = read.model_dump(mode="json", by_alias=True)
        assert {name: written[name] for name in status} == status
        schema = release.schemas[kind]["properties"]["status"]
        left = pruned(read.model_dump(mode="json", by_alias=True, exclude_none=True), schema)
        assert list(violations(left, schema)) == []


def test_a_removed_field_a_tighter_bound_and_another_default_are_found() -> None:
    old = {"properties": {"a": {"type": "integer", "maximum": 9, "default": 1}, "b": {"enum": ["x", "y"]}}}
    new: Any = deepcopy(old)
    new["properties"]["a"] |= {"maximum": 8, "minimum": 2, "default": 2}
    new["properties"]["b"]["enum"] = ["x"]
    new["required"] = ["a"]
    assert list(narrowed(old, new)) == [
        ".a: is required now",
        ".a: default was 1, is 2",
        ".a: minimum was None, is 2",
        ".a: maximum was 9, is 8",
        ".b: enum was ['x', 'y'], is ['x']",
    ]
    del new["properties"]["b"]
    assert ".b: is gone" in list(narrowed(old, new))
    assert list(narrowed(old, old | {"properties": old["properties"] | {"c": {"type": "string"}}})) == []
