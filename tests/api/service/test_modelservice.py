"""The models of a ModelService: defaults, round trips, names, and the forms of its texts."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from spotune.job_file.load import load_service
from spotune.service import ModelService
from spotune.service.field_types import (
    ClaimName,
    ClaimPath,
    HostName,
    ModelId,
    ModelSource,
    OptionalAddress,
    OptionalServiceName,
)
from tests.api.support.service_files import FULL_SERVICE_FILE, SERVICE_FILE, a_service


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "service.yaml"
    file.write_text(text)
    return file


def all_sections(section: type[BaseModel] = ModelService) -> Iterator[type[BaseModel]]:
    yield section
    for field in section.model_fields.values():
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from all_sections(annotation)


def is_valid(kind: Any, value: object) -> bool:
    try:
        TypeAdapter[Any](kind).validate_python(value)
    except ValidationError:
        return False
    return True


def test_a_service_needs_only_a_model() -> None:
    service = a_service()
    assert (service.spec.replicas.min, service.spec.replicas.max) == (1, 1)
    assert service.spec.gpus == 1
    assert service.spec.capacity == "spot"
    assert service.spec.request_timeout.seconds == 600
    assert service.spec.ingress is None
    assert service.spec.http_route is None
    assert service.spec.adapters == []


def test_a_service_with_every_field_survives_a_round_trip_through_yaml_and_json(tmp_path: Path) -> None:
    service = load_service(written(tmp_path, FULL_SERVICE_FILE))
    assert ModelService.model_validate_json(service.model_dump_json()) == service
    again = yaml.safe_dump(service.model_dump(mode="json"))
    assert load_service(written(tmp_path, again)) == service


def test_the_full_file_names_every_field_there_is(tmp_path: Path) -> None:
    def unset(section: BaseModel, path: str) -> Iterator[str]:
        for name in type(section).model_fields:
            value = getattr(section, name)
            if name not in section.model_fields_set:
                yield f"{path}.{name}"
            elif isinstance(value, BaseModel):
                yield from unset(value, f"{path}.{name}")

    # a model has one of three origins; the operator writes the status
    exempt = {"service.spec.model.claim", "service.status"}
    service = load_service(written(tmp_path, FULL_SERVICE_FILE))
    assert set(unset(service, "service")) == exempt


def test_every_field_and_section_has_a_description_for_the_custom_resource_definition() -> None:
    fields = [(section, name, field) for section in all_sections() for name, field in section.model_fields.items()]
    assert len(fields) > 40
    assert [f"{section.__name__}.{name}" for section, name, field in fields if not field.description] == []
    assert all(section.__doc__ for section in all_sections())


@pytest.mark.parametrize(("given", "model_id"), [("", "answers"), ("team/llama:8b", "team/llama:8b")])
def test_the_model_is_called_like_the_service_unless_it_has_a_name(given: str, model_id: str) -> None:
    assert a_service(model={"name": given, "finetuneJob": "job"}).model_id == model_id


@pytest.mark.parametrize(("replicas", "autoscales"), [({}, False), ({"max": 2}, True), ({"min": 0}, True)])
def test_a_service_autoscales_if_it_may_have_more_replicas_than_the_minimum(
    replicas: dict[str, int], autoscales: bool
) -> None:
    assert a_service(replicas=replicas).spec.replicas.autoscales is autoscales


def test_a_status_of_a_newer_operator_can_be_read() -> None:
    status = {"phase": "Ready", "newField": 1, "model": {"location": "a", "version": "b", "size": 3}}
    content = yaml.safe_load(SERVICE_FILE) | {"status": status}
    service = ModelService.model_validate(content, by_alias=True, by_name=False)
    assert service.status is not None
    assert service.status.phase == "Ready"


@pytest.mark.parametrize(
    ("kind", "valid", "invalid"),
    [
        (
            ModelId,
            ["a", "llama-3.1:8B", "meta-llama/Llama_3", "a" * 128],
            ["", "-a", "a/", "a b", "ä", "a\n", "a" * 129],
        ),
        (
            ModelSource,
            ["", "hf://gpt2", "hf://google-t5/t5-small", "s3://bucket/team/llama", "s3://my.bucket/a_b/step=5/"],
            [
                *("hf://", "hf:///a", "hf://a/b/c", "hf://a/..", "models/a", "hf://a/b\n", "hf://a b"),
                *("s3://a/b", "s3://bucket", "s3://bucket/", "s3://Bucket/a", "s3://bucket//a", "s3://bucket/a b"),
            ],
        ),
        (ClaimName, ["exports", "a-b.c", "a" * 253], ["", "Exports", "a_b", "a/b", ".a", "a" * 254]),
        (HostName, ["localhost", "models.example.com"], ["", "https://a.b", "a.b/c", "a.b:80", "*.a.b", "A.b", "a..b"]),
        (
            OptionalAddress,
            ["", "redis:6379", "10.0.0.1:6379", "[::1]:6379"],
            ["redis", "redis://redis:6379", "redis:port", ":6379", "a b:1", "redis:6379/0", "redis:123456"],
        ),
        (OptionalServiceName, ["", "a", "my-model-2", "a" * 40], ["A", "a.b", "-a", "a_b", "a" * 41]),
        (ClaimPath, ["", "/", "a/b", "a..b/..c", "x" * 1024], ["..", "a/../b", "/..", "x" * 1025]),
    ],
    ids=["ModelId", "ModelSource", "ClaimName", "HostName", "OptionalAddress", "OptionalServiceName", "ClaimPath"],
)
def test_a_text_must_have_its_form(kind: Any, valid: list[str], invalid: list[str]) -> None:
    assert [text for text in valid if not is_valid(kind, text)] == []
    assert [text for text in invalid if is_valid(kind, text)] == []


def test_a_path_never_leaves_the_volume() -> None:
    """The pattern accepts all paths but those with a part `..`."""
    paths = ["".join(parts) for length in range(8) for parts in itertools.product("./a", repeat=length)]
    assert [path for path in paths if is_valid(ClaimPath, path) == (".." in path.split("/"))] == []
