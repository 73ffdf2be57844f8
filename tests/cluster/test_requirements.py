"""The chart refuses clusters that spotune does not work in."""

from __future__ import annotations

import pytest

from tests.cluster.chart import CHART, HelmError, helm

pytestmark = pytest.mark.cluster
KINDS = ("--api-versions=v1/Pod",)
"""Of a cluster whose kinds Helm knows, without KubeRay's."""
POLICIES = ("--set=policies.enabled=true", "--set=policies.maxWorkers=4")


def template(version: str, *options: str) -> str:
    return helm("template", "spotune", str(CHART), f"--kube-version={version}", *options)


@pytest.mark.parametrize(
    ("version", "options", "words"),
    [
        ("1.28.15", (), "chart requires kubeVersion: >=1.29.0-0"),
        ("1.29.0", POLICIES, "policies.enabled needs Kubernetes 1.30"),
        ("1.34.0", KINDS, "KubeRay is not installed in this cluster"),
    ],
)
def test_cluster_that_lacks_something_is_refused_by_name(version: str, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(HelmError) as caught:
        template(version, *options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("1.29.0-eks-1234", ()),  # providers append their own version
        ("1.30.0-gke.100", POLICIES),
        ("1.34.0", (*KINDS, "--api-versions=ray.io/v1/RayCluster")),
        ("1.34.0", (*KINDS, "--set=kuberay.check=false")),
    ],
)
def test_other_clusters_are_not(version: str, options: tuple[str, ...]) -> None:
    assert "kind: Deployment" in template(version, *options)
