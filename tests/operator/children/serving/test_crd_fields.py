"""Every rendered RayService is valid by KubeRay's own CRD."""

from typing import Any

import pytest

from spotune_operator.providers import PROVIDERS, Provider
from tests.operator.support.crd_schema import kuberay_definition, schema_of, violations
from tests.operator.support.resolved_services import TRAINED, child, resolved_service_of

EVERYTHING: dict[str, Any] = {
    "replicas": {"min": 0, "max": 4},
    "capacity": "mixed",
    "gpus": 2,
    "engine": "vllm",
    "batchInvariant": True,
    "priorityClassName": "serving",
    "serviceAccountName": "reader",
    "podTemplate": {"metadata": {"annotations": {"why": "because"}}, "spec": {"nodeSelector": {"pool": "gpu"}}},
    "gateway": {"replicas": 2, "podTemplate": {"spec": {"imagePullSecrets": [{"name": "registry"}]}}},
    "apiKeysSecretRef": {"name": "keys", "key": "keys"},
    "cluster": {"redisAddress": "redis:6379", "redisPasswordSecretRef": {"name": "redis", "key": "password"}},
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    definition = kuberay_definition("rayservices")
    if not definition.exists():
        pytest.skip(f"{definition} is not there; `make cluster-build` downloads it")
    return schema_of(definition, "v1")


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
@pytest.mark.parametrize("spec", [{}, EVERYTHING], ids=["smallest", "everything"])
def test_kuberay_knows_every_field(provider: Provider, spec: dict[str, Any], schema: dict[str, Any]) -> None:
    resolved = resolved_service_of(provider, adapters={"sql": TRAINED}, **spec)
    assert list(violations(child(resolved, "RayService"), schema)) == []


def test_schema_check_finds_an_unknown_field_of_a_pod(schema: dict[str, Any]) -> None:
    manifest = child(resolved_service_of(), "RayService")
    manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containerz"] = []
    place = ".spec.rayClusterConfig.workerGroupSpecs[0].template.spec.containerz"
    assert list(violations(manifest, schema)) == [f"{place}: unknown"]
