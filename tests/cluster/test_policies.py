"""Organisation rules of the chart: what its templates say, and what a real API server refuses by them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from spotune_testcluster.waiting import wait_for
from tests.api.support.job_files import a_job
from tests.api.support.sweep_files import a_sweep
from tests.cluster.chart import NAMESPACE, HelmError, template
from tests.cluster.definitions import apply_definitions
from tests.cluster.operator_install import no_operator

pytestmark = pytest.mark.cluster

LABEL = "spotune-policies-test"
RULES: dict[str, Any] = {
    "enabled": True,
    "namespaceSelector": {"matchLabels": {LABEL: "true"}},
    "imagePrefixes": ["registry.example/ml/"],
    "nodeSelectors": ["pool=team-a", "pool=team-b"],
    "maxWorkers": 8,
    "maxGpuHours": 100,
}
SELECTOR = {"spec": {"nodeSelector": {"pool": "team-a"}}}
CONTAINER = {"name": "x", "image": "docker.io/x"}


def rendered(folder: Path, namespace: str = NAMESPACE, **policies: Any) -> list[dict[str, Any]]:
    """The objects of the chart for these rules."""
    values = folder / "values.yaml"
    values.write_text(yaml.safe_dump({"policies": policies}))
    found = [each for each in yaml.safe_load_all(template(preset=values, namespace=namespace)) if each]
    return [each for each in found if "Admission" in each["kind"] or each["metadata"]["name"].endswith("-policies")]


def test_rules_are_off_by_default_and_need_one(tmp_path: Path) -> None:
    assert rendered(tmp_path) == []
    with pytest.raises(HelmError, match=r"policies\.enabled needs a rule"):
        rendered(tmp_path, enabled=True)
    with pytest.raises(HelmError, match="imagePrefixes"):
        rendered(tmp_path, enabled=True, imagePrefixes=["registry.example/ml"])  # would allow .../ml-of-others


def test_only_the_rules_that_are_set_are_rendered(tmp_path: Path) -> None:
    found = rendered(tmp_path, enabled=True, maxWorkers=4)
    policies = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"].endswith("Policy")}
    assert set(policies) == {"spotune-operator-finetunejobs", "spotune-operator-finetunesweeps"}
    assert [len(policy["validations"]) for policy in policies.values()] == [1, 1]
    bindings = [each["spec"] for each in found if each["kind"].endswith("Binding")]
    assert [each["validationActions"] for each in bindings] == [["Deny"], ["Deny"]]


def good_job() -> dict[str, Any]:
    """A job that keeps all rules."""
    job = a_job(
        workers={"count": 4, "podTemplate": SELECTOR},
        retry={"maxGpuHours": 50},
        cluster={"image": "registry.example/ml/trainer:1"},
    )
    return manifest(job)


def good_sweep() -> dict[str, Any]:
    """A sweep that keeps all rules: eight workers at most at a time."""
    sweep = manifest(a_sweep())
    sweep["spec"]["template"]["spec"] |= {key: good_job()["spec"][key] for key in ("workers", "cluster")}
    sweep["spec"] |= {"maxConcurrent": 2, "budget": {"maxGpuHours": 60}}
    return sweep


def manifest(found: Any) -> dict[str, Any]:
    """The manifest of a model, without a namespace."""
    content: dict[str, Any] = found.model_dump(mode="json", exclude_unset=True)
    metadata = {"name": content["metadata"]["name"]}
    return {"apiVersion": found.api_version, "kind": found.kind, "metadata": metadata, "spec": content["spec"]}


def edited(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value of a field."""
    changed = copy.deepcopy(base)
    node = changed["spec"]
    *parents, last = path.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return changed


@pytest.fixture(scope="module")
def teams(cluster: ClusterUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """A namespace with the rules."""
    apply_definitions(cluster.kubectl)
    with no_operator(cluster), temporary_namespace(cluster.kubectl) as kubectl:
        found = rendered(tmp_path_factory.mktemp("rules"), kubectl.namespace, **RULES)
        objects = "---\n".join(yaml.safe_dump(each) for each in found)
        cluster.kubectl("label", "namespace", kubectl.namespace, f"{LABEL}=true")
        old = edited(good_job(), "cluster.image", "evil/old:1")
        old["metadata"]["name"] = "old"
        kubectl("apply", "--filename=-", stdin=json.dumps(old))  # from before the rules
        cluster.kubectl("apply", "--filename=-", stdin=objects)
        try:
            wrong_job, wrong_sweep = edited(good_job(), "workers.count", 9), edited(good_sweep(), "maxConcurrent", 3)
            for what, wrong in (("jobs", wrong_job), ("sweeps", wrong_sweep)):  # each kind has a policy of its own
                wait_for(f"the rules of {what}", 60, partial(_is_refused, kubectl, wrong))
            yield kubectl
        finally:
            cluster.kubectl("delete", "--ignore-not-found", "--filename=-", stdin=objects)


def _is_refused(kubectl: Kubectl, wrong: dict[str, Any]) -> bool:
    return "at most 8" in refusal(kubectl, wrong)


def refusal(kubectl: Kubectl, found: dict[str, Any]) -> str:
    """Why the API server refuses an object; empty if it takes it."""
    try:
        kubectl("create", "--dry-run=server", "--filename=-", stdin=json.dumps(found))
    except KubectlError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cluster.image", "registry.example/ml/trainer:2", ""),
        (
            "cluster.image",
            "registry.example/ml-of-others/x",
            "spec: image registry.example/ml-of-others/x is not allowed",
        ),
        ("head.podTemplate", {"spec": {"initContainers": [CONTAINER]}}, "spec: image docker.io/x is not allowed"),
        ("workers.podTemplate", {"spec": {**SELECTOR["spec"], "containers": [CONTAINER]}}, "image docker.io/x"),
        ("workers.podTemplate", {}, "spec.workers: select nodes by one of pool=team-a,pool=team-b"),
        ("workers.count", 9, "spec.workers.count: at most 8 workers"),
        ("retry.maxGpuHours", 0, "spec.retry.maxGpuHours: set a limit of at most 100"),
        ("retry.maxGpuHours", 100.5, "spec.retry.maxGpuHours: set a limit of at most 100"),
    ],
)
def test_a_job_is_refused_by_the_name_of_the_field(teams: Kubectl, path: str, value: Any, message: str) -> None:
    found = refusal(teams, edited(good_job(), path, value))
    assert message in found
    assert bool(found) == bool(message), found


def test_sweeps_are_bounded_as_a_whole(teams: Kubectl) -> None:
    sweep = good_sweep()
    assert refusal(teams, sweep) == ""
    assert "spec.template.spec.workers.count: at most 8" in refusal(teams, edited(sweep, "maxConcurrent", 3))
    assert "spec.budget.maxGpuHours: set a limit" in refusal(teams, edited(sweep, "budget", {}))


def test_a_job_from_before_the_rules_may_be_suspended_but_not_grow(teams: Kubectl) -> None:
    teams("patch", "ftj", "old", "--type=merge", "--patch", '{"spec":{"suspend":true}}')
    with pytest.raises(KubectlError, match="evil/old:1 is not allowed"):
        teams("patch", "ftj", "old", "--type=merge", "--patch", '{"spec":{"workers":{"count":5}}}')


def test_bounds_are_parameters_that_the_api_server_reads_again(teams: Kubectl) -> None:
    def bound(workers: int) -> None:
        """Set the bound in the ConfigMap."""
        patch = json.dumps({"data": {"maxWorkers": str(workers)}})
        teams("patch", "configmap", "spotune-operator-policies", "--type=merge", "--patch", patch)

    bound(3)
    wait_for("the lower bound", 60, lambda: "at most 3 workers" in refusal(teams, good_job()))
    bound(8)
    wait_for("the old bound", 60, lambda: refusal(teams, good_job()) == "")


def test_types_fit_the_definitions(teams: Kubectl, cluster: ClusterUnderTest) -> None:
    """The API server checks the expressions against the CRDs. Fields that a later version adds are not known to it."""
    for plural in ("finetunejobs", "finetunesweeps", "modelservices"):
        policy = cluster.kubectl.get("validatingadmissionpolicy", f"spotune-operator-{plural}")
        warnings = (policy.get("status", {}).get("typeChecking") or {}).get("expressionWarnings") or []
        assert [each for each in warnings if "undefined field" not in each["warning"]] == []
