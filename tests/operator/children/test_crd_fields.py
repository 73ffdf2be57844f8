"""Every rendered RayCluster is valid by KubeRay's own CRD."""

from typing import Any

import pytest

from spotune_operator.children.raycluster import Replicas, ray_cluster
from spotune_operator.providers import PROVIDERS, Provider
from tests.operator.children.test_pods import CREDENTIALS
from tests.operator.support.crd_schema import kuberay_definition, schema_of, violations
from tests.operator.support.resolved_jobs import resolved_job_of

TEMPLATE = {
    "metadata": {"annotations": {"why": "because"}},
    "spec": {"initContainers": [{"name": "first", "image": "x"}], "nodeSelector": {"pool": "gpu"}},
}
EVERYTHING: dict[str, Any] = CREDENTIALS | {
    "workers": {
        "count": 2,
        "gpus": 2,
        "capacity": "spot-then-on-demand",
        "serviceAccountName": "trainer",
        "podTemplate": TEMPLATE,
    },
    "head": {"podTemplate": TEMPLATE},
    "cluster": {"queueName": "gpu"},
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    definition = kuberay_definition("rayclusters")
    if not definition.exists():
        pytest.skip(f"{definition} is not there; `make cluster-build` downloads it")
    return schema_of(definition, "v1")


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
@pytest.mark.parametrize("sections", [{}, EVERYTHING], ids=["smallest", "everything"])
def test_kuberay_knows_every_field(provider: Provider, sections: dict[str, Any], schema: dict[str, Any]) -> None:
    assert list(violations(ray_cluster(resolved_job_of(provider, **sections), Replicas(1)), schema)) == []


def test_schema_check_finds_unknown_fields_and_wrong_types(schema: dict[str, Any]) -> None:
    cluster = ray_cluster(resolved_job_of(), Replicas(1))
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containerz"] = []
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    del cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert sorted(violations(cluster, schema)) == [
        ".spec.headGroupSpec.rayStartParams.num-cpus: not of type string",
        ".spec.headGroupSpec.template.spec.containers: missing",
        ".spec.workerGroupSpecs[0].template.spec.containerz: unknown",
    ]
