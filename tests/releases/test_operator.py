"""Jobs and services that an earlier release runs, after an upgrade of the operator: nothing of them changes.

Each recorded object was rendered by the operator of its release. Today's operator, with other default images, finds it
with the defaults of today's definition and its status, and must apply the same children: KubeRay gives a changed pod
template to the next pods only, so the workers of one job would be of two versions, and a changed RayService starts a
second cluster. A pod of another template hash is replaced, which costs a restart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJobStatus
from spotune.job_file.load import parse_job, parse_service
from spotune.job_file.yaml_file import Document
from spotune.service import ModelServiceStatus
from spotune_operator.children.config import JOB_FILE
from spotune_operator.cli.service_status import service_table
from spotune_operator.cli.status import table
from spotune_operator.kube.conditions import is_true
from spotune_operator.reconcile.pinned import resolve_as_pinned
from tests.operator.cli.test_status import rendered, shown
from tests.operator.serving import scenario as services
from tests.operator.support import scenarios as jobs
from tests.operator.support.objects import NOW, ago
from tests.releases.definitions import pruned, with_defaults
from tests.releases.recording.children import SETTINGS, observe_running_job, observe_running_service
from tests.releases.release import Release, releases
from tests.releases.test_definitions import RELEASES, today

Children = dict[tuple[str, str], dict[str, Any]]
UPGRADED = replace(
    SETTINGS, image="spotune/trainer:new", ray_version="9.9.9", serve_image="serve:new", serve_vllm_image="vllm:new"
)
CHANGED_CHILDREN = {
    ("before-v0.1.0", "ConfigMap"): "its job file had all defaults; today's is shorter, and says the same",
}
"""Children of running objects that an upgrade changes, by release and kind, with the reason."""
NEVER_CHANGED = {"RayCluster", "RayService"}
"""Children whose change reaches the pods."""


def of_kind(kind: str) -> list[Any]:
    """Parameters of a test: each recorded object of a kind, of all releases."""
    return [
        pytest.param(release, found, id=f"{release.name}-{found['body']['metadata']['name']}")
        for release in releases()
        for found in release.objects
        if found["body"]["kind"] == kind
    ]


def by_name(children: list[dict[str, Any]]) -> Children:
    return {(child["kind"], child["metadata"]["name"]): child for child in children}


def upgraded_job(found: dict[str, Any]) -> jobs.Scenario:
    """A running job of an earlier release, as today's operator finds it."""
    body = with_defaults(found["body"], today()["FinetuneJob"])
    status = FinetuneJobStatus.model_validate(found["status"])
    scenario = jobs.Scenario(parse_job(Document(content=body)), settings=UPGRADED, status=status)
    observe_running_job(scenario)
    return scenario


@pytest.mark.parametrize(("release", "found"), of_kind("FinetuneJob"))
def test_running_job_keeps_its_pods_and_children(release: Release, found: dict[str, Any]) -> None:
    scenario = upgraded_job(found)
    decision = scenario.decide()
    assert [*decision.delete, *decision.force_delete, *decision.delete_gracefully] == []
    assert decision.command == ""
    assert decision.status.pinned == FinetuneJobStatus.model_validate(found["status"]).pinned
    assert is_true(decision.status.conditions, "Training")
    resolved = resolve_as_pinned(scenario.job, decision.status.pinned, (), UPGRADED, "uid-1")
    assert decision.status.pinned is not None
    assert f'"{resolved.directory}"' in decision.status.pinned.ray_cluster  # its name has the fingerprint
    before, now = by_name(found["children"]), by_name(list(decision.apply))
    job_files = [next(child for key, child in each.items() if key[0] == "ConfigMap") for each in (before, now)]
    says_the_same(release, *(each["data"][JOB_FILE] for each in job_files))
    assert unchanged(release, now) == unchanged(release, before)


def unchanged(release: Release, children: Children) -> Children:
    """The children that an upgrade must not change."""
    return {key: child for key, child in children.items() if (release.name, key[0]) not in CHANGED_CHILDREN}


def says_the_same(release: Release, before: str, now: str) -> None:
    """Today's job file can be read by the supervisor of the release, and is the same job."""
    old, new = yaml.safe_load(before), yaml.safe_load(now)
    schema = release.schemas["FinetuneJob"]
    assert pruned(new, schema) == new  # the models of the release refuse fields that they do not know
    filled = [with_defaults(content["spec"], schema["properties"]["spec"]) for content in (new, old)]
    assert filled[0] == filled[1]
    jobs_of = [parse_job(Document(content=content)) for content in (old, new)]
    assert fingerprint(jobs_of[0]) == fingerprint(jobs_of[1])


@pytest.mark.parametrize(("release", "found"), of_kind("ModelService"))
def test_running_service_keeps_its_pods_and_children(release: Release, found: dict[str, Any]) -> None:
    body = with_defaults(found["body"], today()["ModelService"])
    status = ModelServiceStatus.model_validate(found["status"])
    scenario = services.Scenario(parse_service(Document(content=body)), settings=UPGRADED, status=status)
    observe_running_service(scenario)
    decision = scenario.decide()
    assert decision.status.pinned == status.pinned
    assert status.pinned is not None
    before, now = by_name(found["children"]), by_name(list(decision.apply))
    assert unchanged(release, now) == unchanged(release, before)


@RELEASES
def test_spotune_status_shows_the_objects_of_the_release(release: Release) -> None:
    for found in release.objects:
        metadata = {**found["body"]["metadata"], "uid": "uid-1", "generation": 1, "creationTimestamp": ago(3600)}
        status = {name: value for name, value in found["status"].items() if value is not None}
        served = {**found["body"], "metadata": metadata, "status": status}
        if served["kind"] == "FinetuneJob":
            (line,) = rendered(table([served], NOW, with_namespace=False, with_bar=False))[1:]
            assert "10/100" in line
            assert "step 8" in shown(served)["checkpoint"]
        else:
            line = rendered(service_table([served], NOW, with_namespace=False))[1]
        assert line.startswith(metadata["name"])


def test_no_change_that_reaches_pods_is_allowed() -> None:
    assert not {kind for _, kind in CHANGED_CHILDREN} & NEVER_CHANGED
    assert {release for release, _ in CHANGED_CHILDREN} <= {release.name for release in releases()}


@RELEASES
def test_a_changed_pod_template_is_noticed(release: Release) -> None:
    """The comparison above can fail: without its pin, a job gets the new image and other pods."""
    (found, *_) = (each for each in release.objects if each["body"]["kind"] == "FinetuneJob")
    without_pin = {name: value for name, value in found["status"].items() if name != "pinned"}
    scenario = upgraded_job(found)
    scenario.status = FinetuneJobStatus.model_validate(without_pin)
    decision = scenario.decide()
    clusters = [by_name(list(given)) for given in (decision.apply, found["children"])]
    assert clusters[0] != clusters[1]
    assert decision.command == "stop"  # commit first: all pods are to be replaced
