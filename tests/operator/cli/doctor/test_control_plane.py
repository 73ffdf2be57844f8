"""Checks of the API server, KubeRay and spotune's CRD and operator."""

import copy
from typing import Any

import pytest

from spotune.crd.definition import custom_resource_definition
from spotune_operator.cli.doctor.check import Check, Forbidden, Verdict
from spotune_operator.cli.doctor.control_plane import (
    api_server,
    job_definition,
    kuberay_definition,
    kuberay_operator,
    operator,
)

FORBIDDEN = Forbidden('User "ana" cannot list resource "deployments"')


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
    """The OpenAPI document of FinetuneJobs as an API server publishes it, with its additions and JSON numbers."""
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
def test_old_api_server_fails_the_check(minor: str, verdict: str) -> None:
    check = api_server(version(minor), "https://host")
    assert found(check) == (verdict, f"Kubernetes 1.{minor.rstrip('+')}.4-gke.100 at https://host")


def test_kuberay_version_is_detected_from_its_crd() -> None:
    assert kuberay_definition(None).verdict is Verdict.FAILED
    assert kuberay_definition(ray_clusters("rayVersion")).message.endswith(
        "KubeRay is older than 1.5 and has no token authentication"
    )
    assert kuberay_definition(ray_clusters("rayVersion", "authOptions")).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("seen", "verdict", "message"),
    [
        (FORBIDDEN, "warning", f"cannot check whether it runs: {FORBIDDEN.reason}"),
        ([], "warning", "no Deployment of KubeRay's operator was found; the cloud provider may run it"),
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
def test_kuberay_operator_deployment(seen: Any, verdict: str, message: str) -> None:
    assert found(kuberay_operator(seen)) == (verdict, message)


def test_matching_crd_passes() -> None:
    assert job_definition(published()).verdict is Verdict.PASSED
    assert job_definition(None).verdict is Verdict.FAILED


def test_older_crd_is_detected_by_missing_fields() -> None:
    document = published()
    del spec_of(document)["checkpoint"]
    del spec_of(document)["workers"]["properties"]["capacity"]
    check = job_definition(document)
    assert found(check) == (
        "warning",
        "the FinetuneJob CRD is older than this spotune: it lacks spec.checkpoint, spec.workers.capacity",
    )
    assert "kubectl apply" in check.remedy


def test_newer_crd_is_detected_by_additional_fields() -> None:
    document = published()
    spec_of(document)["schedule"] = {"type": "object", "properties": {"at": {"type": "string"}}}
    assert job_definition(document).message.endswith("is newer than this spotune: this version lacks spec.schedule")


def test_crd_with_other_rules_is_detected() -> None:
    document = published()
    spec_of(document)["training"]["properties"]["epochs"]["minimum"] = 2
    spec_of(document)["training"]["properties"]["epochs"]["description"] = "Other words are no other rule."
    assert job_definition(document).message.endswith("differs from this spotune's version in spec.training.epochs")


@pytest.mark.parametrize(
    ("seen", "verdict", "message"),
    [
        (FORBIDDEN, "warning", f"cannot check whether it runs: {FORBIDDEN.reason}"),
        (
            [deployment("spotune-x", "spotune:1", name="spotune", component="head")],
            "failed",
            "no Deployment of spotune's operator was found: jobs will not start",
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
def test_spotune_operator_deployment(seen: Any, verdict: str, message: str) -> None:
    assert found(operator(seen)) == (verdict, message)
