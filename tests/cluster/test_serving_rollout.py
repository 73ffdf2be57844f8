"""Rollouts of a ModelService on a real Kubernetes with KubeRay: in steps, under load, and back again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from spotune_testcluster.waiting import wait_for
from tests.cluster.finetune_jobs import Workplace
from tests.cluster.model_services import (
    SECONDS_TO_SERVE,
    RunningService,
    add_model,
    model_on_claim,
    running_service,
    service_manifest,
)
from tests.cluster.operator_install import Operator
from tests.cluster.service_load import Load, load_on

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

NAME = "rolling"
FIRST, SECOND, BROKEN = "rolling-first", "rolling-second", "rolling-broken"
ROLLOUT = {
    "steps": [20, 100],
    "pause": "10s",
    # The machine of the test is busy: latencies say nothing about the versions.
    "promoteIf": {"minRequests": 5, "notWorseBy": 10, "maxErrorRate": 0},
}


@pytest.fixture(scope="module")
def service(operator: Operator, workplace: Workplace) -> Iterator[RunningService]:
    add_model(workplace, FIRST)
    add_model(workplace, SECOND)
    add_model(workplace, BROKEN, without="model.safetensors")
    replicas = {"min": 1, "max": 1}
    manifest = service_manifest(workplace, NAME, model=model_on_claim(FIRST), replicas=replicas, rollout=ROLLOUT)
    with operator.with_values("serving.enabled=true"), running_service(workplace, manifest) as found:
        found.wait_until_ready(replicas=1)
        yield found


def version(folder: str) -> str:
    return f"inputs/{folder}"


def roll_out(service: RunningService, folder: str, reason: str) -> None:
    """Change the model, and wait until the rollout has ended for this reason."""
    patch = json.dumps({"spec": {"model": model_on_claim(folder)}})
    generation = service.kubectl.get("modelservice", service.name)["metadata"]["generation"]
    service.kubectl("patch", "modelservice", service.name, "--type=merge", f"--patch={patch}")

    def has_ended() -> bool:
        is_seen = service.status()["observedGeneration"] > generation
        return is_seen and service.condition("RolledOut").get("reason") == reason

    try:
        wait_for(f"RolledOut {reason}", 2 * SECONDS_TO_SERVE, has_ended, every=1)
    except AssertionError as error:
        raise AssertionError(f"{error}; status: {service.status()}") from error


def clusters(service: RunningService) -> str:
    return service.kubectl("get", "rayclusters", "--output=name")


def wait_for_one_replica_pod(service: RunningService) -> None:
    """Wait until the pods of the version that left are gone."""
    wait_for("one pod with a replica", SECONDS_TO_SERVE, lambda: len(service.pods("replicas")) == 1, every=1)


def test_a_new_version_takes_over_step_by_step_without_a_failed_request(service: RunningService) -> None:
    before = clusters(service)
    gateway = [pod["metadata"]["name"] for pod in service.pods("gateway")]
    with load_on(service) as load:
        roll_out(service, SECOND, "Promoted")
        wait_for_one_replica_pod(service)
    assert load.failed == []
    assert set(load.versions) == {version(FIRST), version(SECOND)}
    assert service.status()["model"]["version"] == version(SECOND)
    assert "error rate 0.0 % against 0.0 %" in service.condition("RolledOut")["message"]
    assert clusters(service) == before, "KubeRay has started a second cluster"
    assert [pod["metadata"]["name"] for pod in service.pods("gateway")] == gateway
    with service.client() as client:
        assert Load(NAME).request(client) == version(SECOND)


def test_a_version_that_does_not_start_is_rolled_back_without_a_failed_request(service: RunningService) -> None:
    before = clusters(service)
    with load_on(service) as load:
        roll_out(service, BROKEN, "RolledBack")
        wait_for_one_replica_pod(service)
    assert load.failed == []
    assert set(load.versions) == {version(SECOND)}
    status = service.status()
    assert status["model"]["version"] == version(SECOND)
    assert status["rejected"]["version"] == version(BROKEN)
    assert service.condition("Ready")["status"] == "True"
    assert clusters(service) == before


def test_going_back_is_a_rollout_and_a_request_can_choose_its_version(service: RunningService) -> None:
    """The candidate answers requests that name it while it gets only a part of the others."""
    slow = json.dumps({"spec": {"rollout": ROLLOUT | {"pause": "1h"}, "model": model_on_claim(FIRST)}})
    service.kubectl("patch", "modelservice", service.name, "--type=merge", f"--patch={slow}")
    wait_for(
        "the first step", SECONDS_TO_SERVE, lambda: service.status().get("rollout", {}).get("weight") == 20, every=1
    )
    with service.client() as client:
        chosen = {name: Load(NAME).request(client, version(name)) for name in (FIRST, SECOND)}
    assert chosen == {name: version(name) for name in (FIRST, SECOND)}
    quick = json.dumps({"spec": {"rollout": {"steps": [100]}}})
    service.kubectl("patch", "modelservice", service.name, "--type=merge", f"--patch={quick}")


def test_the_load_is_shown(service: RunningService) -> None:
    with load_on(service):
        wait_for("requests per second", 180, lambda: service.status().get("requestsPerSecond", 0) > 0, every=1)
        wait_for("time to first token", 180, lambda: "firstTokenMillisecondsP50" in service.status(), every=1)
