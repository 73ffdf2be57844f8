"""The oldest Kubernetes and KubeRay: what the operator says at its start, and the chart with it."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf
import pytest
import yaml
from aiohttp import web

from charts.generate import CHART
from spotune_operator.kube.client import Kube
from spotune_operator.kube.requirements import INSTALL_KUBERAY, OLDEST_KUBERNETES, UPGRADE_KUBERNETES
from spotune_operator.main import startup_problem
from tests.operator.support.local_server import local_server


def ray_clusters(*fields: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"properties": {field: {} for field in fields}}
    return {"components": {"schemas": {"io.ray.v1.RayCluster": {"properties": {"spec": spec}}}}}


async def problem_of(minor: str, published: dict[str, Any] | None, *plurals: str) -> str | None:
    """What an operator says about an API server of a version with KubeRay's CRDs and spotune's kinds."""
    documents: dict[str, Any] = {
        "/version": {"major": "1", "minor": minor, "gitVersion": f"v1.{minor.rstrip('+')}.4-gke.100"},
        "/openapi/v3/apis/ray.io/v1": published,
        "/apis": {"groups": [{"name": "spotune.dev"}]},
        "/apis/spotune.dev/v1alpha1": {"resources": [{"name": plural} for plural in plurals]},
    }

    async def respond(request: web.Request) -> web.Response:
        found = documents.get(request.path)
        return web.json_response(found or {"message": "not found"}, status=200 if found else 404)

    async with local_server(respond) as server, Kube(lambda: kopf.ConnectionInfo(server=server.url)) as kube:
        return await startup_problem(kube)


@pytest.mark.parametrize(
    ("minor", "published", "problem"),
    [
        ("28", ray_clusters("authOptions"), "Kubernetes 1.28.4-gke.100 is too old: upgrade the cluster to Kubernetes"),
        ("29+", None, "RayClusters are not defined in this cluster: KubeRay is not installed: install KubeRay 1.5.1"),
        ("34", ray_clusters("rayVersion"), "the RayCluster CRD has no authOptions: KubeRay is older than 1.5"),
        ("34", ray_clusters("authOptions"), "the API server does not serve FinetuneJobs: apply manifests/crd.yaml"),
    ],
)
def test_operator_names_what_is_too_old_or_missing(minor: str, published: Any, problem: str) -> None:
    assert str(asyncio.run(problem_of(minor, published))).startswith(problem)


@pytest.mark.parametrize("minor", ["29", "34+", "40"])
def test_operator_starts_in_a_supported_cluster(minor: str) -> None:
    assert asyncio.run(problem_of(minor, ray_clusters("authOptions"), "finetunejobs")) is None


def test_chart_and_operator_ask_for_the_same() -> None:
    oldest = ".".join(map(str, OLDEST_KUBERNETES))
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={oldest}.0-0"
    assert oldest in UPGRADE_KUBERNETES
    assert INSTALL_KUBERAY in (CHART / "templates/requirements.yaml").read_text()
