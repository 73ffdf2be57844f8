"""The API server, KubeRay and spotune's own parts, as clusters show them."""

import copy
from typing import Any

import pytest

from spotune.crd.definition import custom_resource_definition
from spotune_operator.cli.doctor.check import Check, Hidden, Verdict
from spotune_operator.cli.doctor.control_plane import (
    api_server,
    job_definition,
    kuberay_definition,
    kuberay_operator,
    operator,
)

HIDDEN = Hidden('User "ana" cannot list resource "deployments"')


def version(minor: str) -> dict[str, str]:
    return {"major": "1", "minor": minor, "gitVersion": f"v1.{minor.rstrip('+')}.4-gke.100"}


def deployment(title: str, image: str, replicas: int = 1, ready: int = 1, **labels: str) -> dict[str, Any]:
    named = {f"app.kubernetes.io/{key}": value for key, value in labels.items()}
    return {
        "metadata": {"name": title, "namespace": "system", "labels": named},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [{"image": image}]}}},
        "status": {"readyReplicas": ready} if ready else {},
    }


def published() -> dict[str, Any]:
    """The OpenAPI of FinetuneJobs as an API server publishes it: with additions of its own, and numbers of JSON."""
    schema = copy.deepcopy(custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["x-kubernetes-group-version-kind"] = [{"group": "spotune.dev", "kind": "FinetuneJob"}]
    schema["properties"]["kind"]["description"] = "Kind is a string value ..."
    schema["properties"]["metadata"] = {"allOf": [{"$ref": "#/components/schemas/ObjectMeta"}]}
    size = schema["properties"]["spec"]["properties"]["storage"]["properties"]["size"]
    size["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    training = schema["properties"]["spec"]["properties"]["training"]["properties"]
    assert training["weightDecay"]["default"] == 0.0
    training["weightDecay"]["default"] = 0
    return {"components": {"schemas": {"dev.spotune.v1alpha1.FinetuneJob": schema, "other.FinetuneJobList": {}}}}


def spec_of(document: dict[str, Any]) -> dict[str, Any]:
    schema = document["components"]["schemas"]["dev.spotune.v1alpha1.FinetuneJob"]
    fields: dict[str, Any] = schema["properties"]["spec"]["properties"]
    return fields


def ray_clusters(*fields: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"properties": {field: {} for field in fields}}
    return {"components": {"schemas": {"io.ray.v1.RayCluster": {"properties": {"spec": spec}}}}}


def found(check: Check) -> tuple[str, str]:
    return check.verdict.value, check.message


@pytest.mark.parametrize(("minor", "verdict"), [("28", "failed"), ("29+", "passed"), ("34", "passed")])
def test_old_api_server_is_refused(minor: str, verdict: str) -> None:
    check = api_server(version(minor), "https://host")
    assert found(check) == (verdict, f"Kubernetes 1.{minor.rstrip('+')}.4-gke.100 at https://host")


def test_kuberay_is_known_by_its_definition() -> None:
    assert kuberay_definition(None).verdict is Verdict.FAILED
    assert kuberay_definition(ray_clusters("rayVersion")).message.endswith(
        "its KubeRay is older than 1.5, without tokens"
    )
    assert kuberay_definition(ray_clusters("rayVersion", "authOptions")).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("seen", "verdict", "message"),
    [
        (HIDDEN, "warning", f"whether it runs cannot be seen: {HIDDEN.reason}"),
        ([], "warning", "no Deployment of KubeRay's operator is seen: it may be run by the cloud"),
        (
            [deployment("kuberay", "quay.io/kuberay/operator:v1.5.0", name="kuberay-operator")],
            "failed",
            "quay.io/kuberay/operator:v1.5.0 is older than 1.5.1",
        ),
        (
            [deployment("kuberay", "mirror.example/ray:v1.6.2", component="kuberay-operator")],
            "passed",
            "system/kuberay is ready (mirror.example/ray:v1.6.2)",
        ),
        (
            [deployment("kuberay", "quay.io/kuberay/operator:nightly", ready=0)],
            "failed",
            "system/kuberay is not ready (quay.io/kuberay/operator:nightly)",
        ),
    ],
)
def test_operator_of_kuberay(seen: Any, verdict: str, message: str) -> None:
    assert found(kuberay_operator(seen)) == (verdict, message)


def test_definition_of_jobs_is_that_of_this_version() -> None:
    assert job_definition(published()).verdict is Verdict.PASSED
    assert job_definition(None).verdict is Verdict.FAILED


def test_older_definition_is_told_by_the_fields_that_it_has_not() -> None:
    document = published()
    del spec_of(document)["checkpoint"]
    del spec_of(document)["workers"]["properties"]["capacity"]
    check = job_definition(document)
    assert found(check) == (
        "warning",
        "the FinetuneJob of this cluster is older than this spotune: it has no spec.checkpoint, spec.workers.capacity",
    )
    assert "kubectl apply" in check.remedy


def test_newer_definition_is_told_by_the_fields_that_it_has() -> None:
    document = published()
    spec_of(document)["schedule"] = {"type": "object", "properties": {"at": {"type": "string"}}}
    assert job_definition(document).message.endswith("is newer than this spotune, which knows no spec.schedule")


def test_definition_with_other_rules_is_told_by_their_fields() -> None:
    document = published()
    spec_of(document)["training"]["properties"]["epochs"]["minimum"] = 2
    spec_of(document)["training"]["properties"]["epochs"]["description"] = "Other words are no other rule."
    assert job_definition(document).message.endswith(
        "is of another version than this spotune: spec.training.epochs differ"
    )


@pytest.mark.parametrize(
    ("seen", "verdict", "message"),
    [
        (HIDDEN, "warning", f"whether it runs cannot be seen: {HIDDEN.reason}"),
        (
            [deployment("spotune-x", "spotune:1", name="spotune", component="head")],
            "failed",
            "no Deployment of spotune's operator is there: jobs stay as they are",
        ),
        (
            [deployment("op", "spotune:1", name="spotune", component="operator")],
            "passed",
            "system/op is ready (spotune:1)",
        ),
        (
            [deployment("op", "spotune:1", 0, 0, name="spotune", component="operator")],
            "failed",
            "system/op is scaled to 0 (spotune:1)",
        ),
        (
            [deployment("op", "spotune:1", 1, 0, name="spotune", component="operator")],
            "failed",
            "system/op is not ready (spotune:1)",
        ),
    ],
)
def test_operator_of_ours(seen: Any, verdict: str, message: str) -> None:
    assert found(operator(seen)) == (verdict, message)
