"""A real API server and KubeRay accept the output of `spotune render`, with restricted pod security."""

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from spotune_trainer.worker_group.worker_node import RAY_COMMAND
from tests import ROOT
from tests.cluster.pods import as_json
from tests.command_line import run_spotune

pytestmark = pytest.mark.cluster

JOBS = ROOT / "tests/operator/reconcile/golden"
NAME = "spotune-t5-wikisql"
CAPACITIES = ("spot", "on-demand", "spot-then-on-demand")


@pytest.fixture
def restricted(namespace: Kubectl) -> Kubectl:
    """A namespace that enforces restricted pod security."""
    namespace("label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted")
    return namespace


@pytest.fixture
def applied(
    cluster: ClusterUnderTest, restricted: Kubectl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Kubectl]:
    """The namespace with the children of a job, whose pods fit no node."""
    job = _job(tmp_path, "t5-wikisql", "spot-then-on-demand", "local")
    children = _children(job, "aks", cluster, restricted, capsys)
    (ray,) = [child for child in children if child["kind"] == "RayCluster"]
    for group in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]):
        group["template"]["spec"]["nodeSelector"] = {"spotune.dev/nowhere": "true"}
    restricted.apply(*children)
    yield restricted
    restricted("delete", "raycluster", NAME)


def _job(folder: Path, name: str, capacity: str, data: str) -> Path:
    """One of the jobs of the golden files, with another name and capacity."""
    text = (JOBS / f"job-{data}.yaml").read_text()
    file = folder / f"{name}.yaml"
    file.write_text(text.replace("name: t5-wikisql", f"name: {name}").replace(": spot}", f": {capacity}}}"))
    return file


def _children(
    job: Path, provider: str, cluster: ClusterUnderTest, namespace: Kubectl, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    options = ("--provider", provider, "--image", cluster.image, "--storage-class", cluster.storage_class)
    code, out, error = run_spotune(capsys, "render", job, *options, "--output", "json")
    assert code == 0, error
    children: list[dict[str, Any]] = json.loads(out)["items"]
    for child in children:
        child["metadata"]["namespace"] = namespace.namespace
    return children


@pytest.mark.parametrize("provider", ["aks", "gke", "eks", "none"])
def test_api_server_takes_every_child_without_a_warning(
    provider: str,
    cluster: ClusterUnderTest,
    restricted: Kubectl,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    children = []
    for capacity, data in itertools.product(CAPACITIES, ("local", "s3", "prepared")):
        job = _job(tmp_path, f"{capacity}-{data}", capacity, data)
        children += _children(job, provider, cluster, restricted, capsys)
    assert {"spotune-spot-then-on-demand-prepared"} <= {child["metadata"]["name"] for child in children}
    options = ["--server-side", "--dry-run=server", "--field-manager=spotune", "--warnings-as-errors", "--filename=-"]
    done = restricted("apply", *options, stdin=as_json(*children))
    assert done.count("serverside-applied (server dry run)") == len(children) == 9 * 4


def test_restricted_namespace_takes_the_pods(applied: Kubectl) -> None:
    head = wait_for("the head pod", 120, lambda: next(iter(_pods(applied, "head")), None))
    assert [container["name"] for container in head["spec"]["containers"]] == ["ray-head", "supervisor"]
    assert len(wait_for("the worker pods", 120, lambda: _all_workers(applied))) == 4


def test_pods_on_demand_come_and_go_without_touching_the_others(applied: Kubectl) -> None:
    before = wait_for("the worker pods", 120, lambda: _all_workers(applied))
    for replicas in (2, 0):
        patch = [{"op": "replace", "path": "/spec/workerGroupSpecs/1/replicas", "value": replicas}]
        applied("patch", "raycluster", NAME, "--type=json", f"--patch={json.dumps(patch)}")
        wait_for("the pods on demand", 60, partial(_has_on_demand, applied, replicas))
    assert _uids(_pods(applied, "worker", "workers")) == _uids(before)


def test_head_service_leads_to_progress_and_to_the_head_pod(applied: Kubectl) -> None:
    service = wait_for("the head service", 120, lambda: next(iter(_services(applied)), None))
    assert {"progress": 8090, "dashboard": 8265}.items() <= {
        port["name"]: port["port"] for port in service["spec"]["ports"]
    }.items()
    head = wait_for("the head pod", 120, lambda: next(iter(_pods(applied, "head")), None))
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()


def test_token_of_the_supervisor_is_kuberays(applied: Kubectl) -> None:
    secret = wait_for("the token's Secret", 120, lambda: next(iter(_secrets(applied)), None))
    assert "auth_token" in secret["data"]


def test_kuberays_own_additions_leave_what_is_ours(applied: Kubectl) -> None:
    (worker, *_) = wait_for("the worker pods", 120, lambda: _all_workers(applied))
    assert worker["metadata"]["labels"]["spotune.dev/job"] == "t5-wikisql"
    assert worker["spec"]["terminationGracePeriodSeconds"] == 30
    container = worker["spec"]["containers"][0]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert mounts.count("/dev/shm") == 1
    start_ray = next(each["value"] for each in container["env"] if each["name"] == RAY_COMMAND)
    assert "--num-gpus=1" in start_ray


def _pods(namespace: Kubectl, kind: str, group: str = "") -> list[dict[str, Any]]:
    selector = f"ray.io/cluster={NAME},ray.io/node-type={kind}" + (f",ray.io/group={group}" if group else "")
    found: list[dict[str, Any]] = namespace.get("pods", f"--selector={selector}")
    return found


def _has_on_demand(namespace: Kubectl, replicas: int) -> bool:
    return len(_pods(namespace, "worker", "on-demand")) == replicas


def _uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def _all_workers(namespace: Kubectl) -> list[dict[str, Any]] | None:
    found = _pods(namespace, "worker")
    return found if len(found) == 4 else None


def _services(namespace: Kubectl) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = namespace.get("services", f"--selector=ray.io/cluster={NAME}")
    return found


def _secrets(namespace: Kubectl) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = namespace.get("secrets", f"--field-selector=metadata.name={NAME}")
    return found
