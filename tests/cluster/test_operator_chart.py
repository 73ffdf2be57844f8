"""The chart: the output of its templates, and the effect of a release on a cluster and its jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from spotune_testcluster.waiting import wait_for
from tests.cluster import chart, prometheus
from tests.cluster.chart import CHART, EVERYTHING, PRESETS, HelmError, helm, rendered
from tests.cluster.finetune_jobs import NOWHERE, Workplace
from tests.cluster.operator_install import DEPLOYMENT, Operator

pytestmark = pytest.mark.cluster


def kinds(objects: list[dict[str, Any]]) -> list[str]:
    return sorted(found["kind"] for found in objects)


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The only object of this kind."""
    (found,) = [found for found in objects if found["kind"] == kind]
    return found


def environment(objects: list[dict[str, Any]]) -> dict[str, str]:
    (container,) = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return {each["name"].removeprefix("SPOTUNE_OPERATOR_"): each.get("value", "") for each in container["env"]}


# Templates


def test_manifest_for_clusters_without_helm_is_current() -> None:
    path = CHART.parent.parent / "manifests/install.yaml"
    assert path.read_text() == chart.manifest(), "run `make manifests`"


@pytest.mark.parametrize("preset", [None, *PRESETS], ids=lambda preset: preset.stem if preset else "default")
def test_helm_finds_nothing_to_object_to(preset: Path | None) -> None:
    values = [f"--values={preset}"] if preset else []
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", str(CHART), *values)


@pytest.mark.parametrize("values", [(), EVERYTHING, ("watchNamespaces={%s}",)], ids=["default", "everything", "team"])
@pytest.mark.usefixtures("_prometheus")
def test_api_server_takes_every_object(values: tuple[str, ...], namespace: Kubectl) -> None:
    """With the API server's own schemas and strict field validation."""
    text = chart.template(
        *(value.replace("%s", namespace.namespace) for value in values), namespace=namespace.namespace
    )
    namespace(
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
        "--filename=-",
        stdin=text,
    )


@pytest.fixture(scope="module")
def _prometheus(cluster: ClusterUnderTest) -> Iterator[None]:
    with prometheus.known(cluster.kubectl, "PodMonitor", "PrometheusRule"):
        yield


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("replicas=2", "'replicas' not allowed"),
        ("image.digest=sha256:12", "/image/digest"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("watchNamespaces={Team}", "/watchNamespaces/0"),
        ("settings.pollSecond=5", "'pollSecond' not allowed"),
        ("settings.pollSeconds=often", "/settings/pollSeconds"),
        ("settings.image=x", "'image' not allowed"),
        ("healing.drain=true", "healing.drain needs healing.cordon"),
        ("healing.deleteNode=true", "healing.deleteNode needs healing.drain"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(value: str, words: str) -> None:
    with pytest.raises(HelmError) as caught:
        rendered(value)
    assert words in str(caught.value)


def test_prices_need_a_currency_and_all_the_same() -> None:
    listed = ("prices[0].source=list", "prices[0].date=2026-11-01")
    with pytest.raises(HelmError, match=r"prices have several currencies \(EUR, USD\): use one"):
        rendered(*listed, "prices[0].price=1 USD", "prices[0].onDemandPrice=2 EUR")
    with pytest.raises(HelmError, match="/prices/0/price"):
        rendered(*listed, "prices[0].price=1.10")


def test_healing_beyond_the_watched_namespaces_is_refused() -> None:
    with pytest.raises(HelmError, match="leave watchNamespaces empty"):
        rendered("watchNamespaces={team}", "healing.cordon=true", "healing.drain=true")


def test_digest_wins_over_the_tag() -> None:
    digest = f"sha256:{64 * 'a'}"
    pod = of_kind(rendered("image.tag=v1", f"image.digest={digest}"), "Deployment")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"spotune/operator@{digest}"


def test_settings_become_variables() -> None:
    values = ("settings.pollSeconds=5", "settings.healAfterSeconds=9", "trainer.image=a/b:1", "watchNamespaces={a,b}")
    images = ("serving.image=a/serve:1", "serving.vllmImage=a/serve-vllm:1")
    found = environment(rendered(*values, *images, "healing.cordon=true"))
    assert found == {
        "NAMESPACE": "",  # a field reference to the pod
        "POLL_SECONDS": "5",
        "HEAL_AFTER_SECONDS": "9",
        "HEAL_CORDON": "true",
        "IMAGE": "a/b:1",
        "SERVE_IMAGE": "a/serve:1",
        "SERVE_VLLM_IMAGE": "a/serve-vllm:1",
        "WATCH_NAMESPACES": "a,b",
    }


def test_parts_come_only_when_they_are_asked_for() -> None:
    default = kinds(rendered())
    for kind in ("PodMonitor", "PrometheusRule", "ConfigMap", "Role"):
        assert kind not in default
    without = rendered("crds.install=false", "rbac.create=false", "rbac.aggregate=false", "networkPolicy.enabled=false")
    assert kinds(without) == ["Deployment", "ServiceAccount"]
    assert {"PodMonitor", "PrometheusRule", "ConfigMap"} <= set(kinds(rendered(*EVERYTHING)))


def definitions(*values: str) -> list[dict[str, Any]]:
    """The CustomResourceDefinitions of the rendered chart."""
    return [found for found in rendered(*values) if found["kind"] == "CustomResourceDefinition"]


def test_upgrade_brings_the_whole_definitions() -> None:
    """The definitions are a template. After rendering by Helm no part is missing and no number has changed."""
    found = sorted(definitions(), key=lambda definition: definition["metadata"]["name"])
    for definition in found:
        del definition["metadata"]["annotations"]
    manifest = yaml.safe_load_all((CHART.parent.parent / "manifests/crd.yaml").read_text())
    assert _with_numbers(found) == sorted(manifest, key=lambda definition: definition["metadata"]["name"])


def test_definitions_can_be_installed_separately() -> None:
    assert definitions("crds.install=false") == []


def _with_numbers(node: Any) -> Any:
    """Convert texts such as `1e-08` to numbers: Go writes numbers so, but PyYAML reads them as texts."""
    if isinstance(node, dict):
        return {key: _with_numbers(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_numbers(value) for value in node]
    return float(node) if isinstance(node, str) and re.fullmatch(r"\d+e-\d+", node) else node


def test_definitions_outlive_the_release_unless_told_otherwise() -> None:
    policy = "helm.sh/resource-policy"
    assert [found["metadata"]["annotations"][policy] for found in definitions()] == ["keep"] * 3
    gone = definitions("crds.keep=false")
    assert [found["metadata"].get("annotations", {}).get(policy) for found in gone] == [None] * 3


# Releases


def test_named_namespaces_are_all_that_the_operator_may_touch(operator: Operator, workplace: Workplace) -> None:
    kubectl = workplace.kubectl
    user = f"--as=system:serviceaccount:{operator.kubectl.namespace}:{DEPLOYMENT}"
    with temporary_namespace(operator.cluster.kubectl) as outside:
        with operator.with_values(f"watchNamespaces={{{kubectl.namespace}}}"):
            for right in (("list", "finetunejobs"), ("create", "rayclusters.ray.io"), ("delete", "pods")):
                assert _can(kubectl, *right, user)
                assert not _can(outside, *right, user)
            manifest = workplace.manifest("alone", head=NOWHERE)
            outside("apply", "--filename=-", stdin=json.dumps(manifest | {"metadata": {"name": "alone"}}))
            with workplace.running(workplace.manifest("watched", head=NOWHERE)) as job:
                job.wait_for("a phase", lambda seen: "phase" in seen.status, 60)
            assert "phase" not in outside.get("finetunejob", "alone")["status"]
            assert outside("get", "configmap,raycluster", "--selector=spotune.dev/job", "--output=name") == ""
        # An operator of all namespaces handles the job that it ignored before.
        look = "--for=jsonpath={.status.phase}"
        outside("wait", "finetunejob/alone", look, "--timeout=60s")
        outside("delete", "finetunejob", "alone")


def test_release_that_goes_leaves_definition_jobs_and_volumes(operator: Operator, workplace: Workplace) -> None:
    own = {"existingClaim": "", "storageClassName": workplace.cluster.storage_class, "size": "300Mi", "retain": False}
    with workplace.running(workplace.manifest("left", head=NOWHERE, storage=own)) as job:
        wait_for("its cluster", 60, lambda: job.kubectl("get", "raycluster", "spotune-left", "--ignore-not-found"))
        before = _uids(job.kubectl)
        try:
            operator.uninstall()
            wait_for("the end of the operator", 60, lambda: not operator.pods(), every=0.3)
            assert _uids(job.kubectl) == before
        finally:
            operator.install()
        assert _uids(job.kubectl) == before


def _can(kubectl: Kubectl, verb: str, resource: str, user: str) -> bool:
    try:
        return kubectl("auth", "can-i", verb, resource, user).strip() == "yes"
    except KubectlError:  # the answer "no" is an error, too
        return False


def _uids(kubectl: Kubectl) -> dict[str, str]:
    own = [f"crd/{plural}.spotune.dev" for plural in ("finetunejobs", "modelservices")]
    found = kubectl.get(*own, "ftj/left", "pvc/spotune-left", "raycluster/spotune-left")
    return {f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["uid"] for each in found}
