"""A ModelService on a real Kubernetes with KubeRay: it answers, survives lost replicas, and is suspended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from openai import OpenAI

from spotune.custom_resource.object_names import WORKER_CONTAINER
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster.containers import kill_container
from tests.cluster.finetune_jobs import Workplace
from tests.cluster.model_services import RunningService, add_model, running_service, service_manifest
from tests.cluster.operator_install import Operator
from tests.cluster.rights import refused
from tests.serve.support.openai_streams import assert_streams_survive, streams_during, undisturbed_streams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAME = "answers"


@pytest.fixture(scope="module")
def service(operator: Operator, workplace: Workplace) -> Iterator[RunningService]:
    add_model(workplace)
    with (
        operator.with_values("serving.enabled=true"),
        running_service(workplace, service_manifest(workplace, NAME)) as found,
    ):
        found.wait_until_ready(replicas=2)
        yield found


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[OpenAI]:
    with service.client() as connected:
        yield connected


def test_status_tells_what_is_served(service: RunningService) -> None:
    status = service.wait_until_ready(replicas=2)
    assert status["phase"] == "Serving"
    assert status["replicas"] == "2/2"
    assert status["url"] == f"http://spotunems-{NAME}.{service.kubectl.namespace}.svc"
    (line,) = service.kubectl("get", "ms", NAME, "--no-headers").splitlines()
    assert line.split()[:3] == [NAME, "Serving", "2/2"]


def test_commands_show_the_service(service: RunningService) -> None:
    def spotune(command: str, *words: str) -> str:
        access = ["--kubeconfig", str(service.kubectl.kubeconfig), "--namespace", service.kubectl.namespace]
        run = [str(Path(sys.executable).with_name("spotune")), command, *words, *access]
        return subprocess.run(run, capture_output=True, text=True, timeout=120, check=False).stdout

    assert json.loads(spotune("status", f"ms/{NAME}", "--output", "json"))["phase"] == "Serving"
    assert [each["name"] for each in json.loads(spotune("status", "--output", "json"))["services"]] == [NAME]
    pods = [pod["metadata"]["name"] for component in ("gateway", "replicas", "head") for pod in service.pods(component)]
    shown = spotune("status", f"ms/{NAME}")
    assert [pod for pod in pods if pod not in shown] == []
    assert spotune("logs", f"ms/{NAME}", "--component", "head").startswith(f"{pods[-1]}: ")
    checks = {check["name"]: check for check in json.loads(spotune("doctor", "--output", "json"))["checks"]}
    assert checks["serving"]["message"] == "the operator reconciles ModelServices, and has the rights for them"
    assert checks["services"]["verdict"] == "passed"


def test_streams_survive_a_killed_replica(cluster: ClusterUnderTest, service: RunningService, client: OpenAI) -> None:
    machine = cluster.machine_for("kill -9 of a container")
    undisturbed = undisturbed_streams(client, NAME)

    def choose_a_replica() -> Callable[[], None]:
        service.wait_until_ready(replicas=2)
        return partial(kill_container, machine, service.pods("replicas")[0], WORKER_CONTAINER)

    assert_streams_survive(client, NAME, undisturbed, choose_a_replica)
    service.wait_until_ready(replicas=2)


@pytest.mark.long
def test_streams_survive_the_deletion_of_a_replica(service: RunningService, client: OpenAI) -> None:
    undisturbed = undisturbed_streams(client, NAME)

    def delete_a_replica() -> None:
        service.kubectl("delete", "pod", service.pods("replicas")[0]["metadata"]["name"], "--wait=false")

    assert streams_during(client, NAME, delete_a_replica) == undisturbed
    service.wait_until_ready(replicas=2)


_HOLD = """
import ray

@ray.remote
class Holder:
    pass

ray.init(address="auto", namespace="test", log_to_driver=False)
holder = Holder.options(name="holder", lifetime="detached", num_cpus=0, resources={"spotune_replica": 1}).remote()
ray.get(holder.__ray_ready__.remote(), timeout=120)
"""
"""Starts an actor in the place of a replica, which it keeps as a reservation does that no head knows."""


@pytest.mark.long
def test_pod_that_ray_does_not_use_is_replaced(service: RunningService) -> None:
    """Ray was seen to keep a pod reserved for a replica that its head, lost meanwhile, never came to know."""
    service.wait_until_ready(replicas=2)
    lost, used = [pod["metadata"]["name"] for pod in service.pods("replicas")]
    in_head = ("exec", service.pods("head")[0]["metadata"]["name"], "--container=ray-head", "--")
    service.kubectl(*in_head, "pkill", "-STOP", "-f", "ray::ServeController")  # so that the actor is the first
    try:
        service.kubectl("delete", "pod", lost, "--force", "--grace-period=0")
        service.kubectl(*in_head, "python", "-c", _HOLD, timeout=180)
    finally:
        service.kubectl(*in_head, "pkill", "-CONT", "-f", "ray::ServeController")
    (held,) = {pod["metadata"]["name"] for pod in service.pods("replicas")} - {used}
    wait_for(f"the deletion of {held}", 300, lambda: held not in _names(service), every=1)
    service.wait_until_ready(replicas=2)
    assert used in _names(service), "a pod with a replica is left alone"


def _names(service: RunningService) -> set[str]:
    return {pod["metadata"]["name"] for pod in service.pods("replicas")}


@pytest.mark.long
def test_replicas_are_added_to_the_running_cluster(service: RunningService) -> None:
    clusters = service.kubectl("get", "rayclusters", "--output=name")
    replicas = '{"spec": {"replicas": {"min": 3, "max": 3}}}'
    service.kubectl("patch", "modelservice", NAME, "--type=merge", f"--patch={replicas}")
    service.wait_until_ready(replicas=3)
    assert service.kubectl("get", "rayclusters", "--output=name") == clusters


@pytest.mark.long
def test_suspended_service_has_no_pods(service: RunningService) -> None:
    service.kubectl("patch", "modelservice", NAME, "--type=merge", '--patch={"spec": {"suspend": true}}')
    wait_for("phase Suspended", 180, lambda: service.status().get("phase") == "Suspended", every=1)
    assert not service.kubectl.get("pods", f"--selector=spotune.dev/service={NAME}")


@pytest.mark.usefixtures("service")
def test_the_operator_has_all_rights_that_it_used(cluster: ClusterUnderTest, operator: Operator) -> None:
    assert not refused(cluster.machine_for("the audit log").files.audit_log, operator.replaced)
