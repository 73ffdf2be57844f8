"""kubeconform accepts all manifests with the schemas of the oldest, the tested and the newest Kubernetes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from spotune_testcluster import binaries
from tests import ROOT
from tests.cluster import chart, schemas
from tests.cluster.chart import EVERYTHING, PRESETS
from tests.cluster.schemas import GATEWAY_API, KARPENTER, KUBERNETES, LOCATION, PROMETHEUS_OPERATOR
from tests.examples.jobs import JOB_FILES

pytestmark = pytest.mark.cluster


MANIFESTS = sorted({*ROOT.glob("manifests/**/*.yaml")} - {*ROOT.glob("manifests/argocd/*")})  # patches, not objects
RENDERED = sorted(ROOT.glob("tests/operator/reconcile/golden/*.yaml"))
RENDERED_SERVICES = sorted(ROOT.glob("tests/operator/children/serving/golden/*.yaml"))
ALL_VALUES = (
    *EVERYTHING,
    "imagePullSecrets[0].name=registry",
    "trainer.image=spotune/trainer:1",
    "settings.pollSeconds=5",
    "serviceAccount.annotations.owner=us",
    "networkPolicy.apiServerCIDRs={10.0.0.0/8}",
    "podAnnotations.owner=us",
    "podLabels.team=us",
    "nodeSelector.pool=system",
    "tolerations[0].operator=Exists",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].key=a",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].operator=Exists",
    "priorityClassName=high",
)
Check = Callable[[str], list[str]]
_template = cache(chart.template)


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemas") / "custom"
    definitions = [
        ROOT / "manifests/crd.yaml",
        *(binaries.kuberay_resources() / f"ray.io_{kinds}.yaml" for kinds in ("rayclusters", "rayservices")),
        GATEWAY_API.folder() / "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
        KARPENTER.folder() / "pkg/apis/crds/karpenter.sh_nodepools.yaml",
    ]
    monitoring = PROMETHEUS_OPERATOR.folder() / "example/prometheus-operator-crd"
    definitions += [monitoring / f"monitoring.coreos.com_{kinds}.yaml" for kinds in ("podmonitors", "prometheusrules")]
    schemas.write_custom(definitions, folder)
    return folder


@pytest.fixture(scope="module", params=KUBERNETES, ids=lambda source: source.version)
def check(request: pytest.FixtureRequest, custom: Path, tmp_path_factory: pytest.TempPathFactory) -> Check:
    """A function that returns the errors in objects (YAML)."""
    folder = tmp_path_factory.mktemp("schemas") / "kubernetes"
    schemas.write_kubernetes(request.param, folder)
    locations = [f"-schema-location={each}/{LOCATION}" for each in (folder, custom)]
    # ClusterConfig is a file for eksctl; no Go module has its schema
    command = [
        str(chart.program().with_name("kubeconform")),
        "-strict",
        "-skip=ClusterConfig",
        "-output=json",
        "-verbose",
    ]

    def problems(text: str) -> list[str]:
        done = subprocess.run([*command, *locations], input=text, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout)["resources"]
        assert found, "kubeconform saw no object"
        bad = [each for each in found if each["status"] in ("statusInvalid", "statusError")]
        assert bool(bad) == bool(done.returncode), done.stderr
        return [f"{each['kind']} {each['name']}: {each['msg']}" for each in bad]

    return problems


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_chart_is_valid_with_a_preset(check: Check, preset: Path) -> None:
    assert check(_template(preset=preset)) == []


@pytest.mark.parametrize("values", [(), ALL_VALUES, ("watchNamespaces={a,b}",)], ids=["default", "everything", "teams"])
def test_chart_is_valid(check: Check, values: tuple[str, ...]) -> None:
    assert check(_template(*values)) == []


@pytest.mark.parametrize(
    "paths",
    [MANIFESTS, JOB_FILES, RENDERED, RENDERED_SERVICES],
    ids=["manifests", "examples", "children of jobs", "children of services"],
)
def test_files_are_valid(check: Check, paths: list[Path]) -> None:
    assert check("\n---\n".join(path.read_text() for path in paths)) == []


@pytest.mark.parametrize("check", KUBERNETES[-1:], indirect=True, ids=lambda source: source.version)
@pytest.mark.parametrize(
    ("right", "wrong", "kind"),
    [
        ("replicas: 1", "replica: 1", "Deployment"),
        ("containerPort: 8080", "containerPort: http", "Deployment"),
        ("podMetricsEndpoints:", "podMetricEndpoints:", "PodMonitor"),
        ("expr:", "expression:", "PrometheusRule"),
        ("scope: Namespaced", "scope: [Namespaced]", "CustomResourceDefinition"),
        ("maxLength:", "maxLengths:", "CustomResourceDefinition"),
        ("replicas: 1", "replicas: 1\n  replicas: 1", "Deployment"),
    ],
)
def test_mistake_in_the_chart_is_found(check: Check, right: str, wrong: str, kind: str) -> None:
    text = _template(*EVERYTHING)
    assert right in text
    assert {problem.partition(" ")[0] for problem in check(text.replace(right, wrong))} == {kind}


@pytest.mark.parametrize("check", KUBERNETES[-1:], indirect=True, ids=lambda source: source.version)
@pytest.mark.parametrize(("right", "wrong"), [("rayVersion:", "rayVersions:"), ("restartPolicy:", "restart:")])
def test_mistake_in_a_child_is_found(check: Check, right: str, wrong: str) -> None:
    text = RENDERED[0].read_text()
    assert right in text
    assert {problem.partition(" ")[0] for problem in check(text.replace(right, wrong))} == {"RayCluster"}
