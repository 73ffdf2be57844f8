"""Every ModelService in examples/ is valid, names a model that an example trains, and can be rendered."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune.job_file.load import load_service
from spotune_operator.children.serving import build_service_children
from spotune_operator.children.serving.resolved_service import ModelLocation, only_version, resolve_service
from spotune_operator.providers import AKS, EKS, GKE, Provider
from tests.examples.jobs import EXAMPLES, JOBS, SERVICE_FILES


@pytest.mark.parametrize("file", SERVICE_FILES, ids=lambda file: file.stem)
def test_models_come_from_jobs_of_examples(file: Path) -> None:
    spec = load_service(file).spec
    named = {spec.model.finetune_job, *(adapter.finetune_job for adapter in spec.adapters)} - {""}
    assert named <= JOBS.keys()
    assert named or spec.model.source


@pytest.mark.parametrize("provider", [AKS, EKS, GKE], ids=lambda provider: provider.name)
@pytest.mark.parametrize("file", SERVICE_FILES, ids=lambda file: file.stem)
def test_objects_can_be_rendered(file: Path, provider: Provider) -> None:
    service = load_service(file)
    location = ModelLocation(claim="models", path="team/model/export", version="1")
    adapters = {adapter.name: location for adapter in service.spec.adapters}
    version = only_version(service, location, adapters)
    children = build_service_children(resolve_service(service, provider, versions=[version]))
    assert {child["kind"] for child in children} >= {"RayService", "Service", "NetworkPolicy"}


def test_the_table_lists_every_service() -> None:
    page = (EXAMPLES / "serving/README.md").read_text()
    assert [file.name for file in SERVICE_FILES if f"]({file.name})" not in page] == []
