"""A ModelService that is corrected before it has served anything, on a real Kubernetes with KubeRay."""

from __future__ import annotations

import pytest

from spotune_testcluster.waiting import wait_for
from tests.cluster.finetune_jobs import Workplace
from tests.cluster.model_services import RunningService, add_model, running_service, service_manifest
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

NAME = "corrected"
TOO_MANY = 64
"""GPUs that no node has."""
_SECONDS_TO_REPLACE = 120.0
"""KubeRay alone keeps the first cluster for `requestTimeout`, ten minutes."""


def test_a_corrected_service_does_not_wait_for_the_end_of_its_first_cluster(
    operator: Operator, workplace: Workplace
) -> None:
    add_model(workplace)
    one = {"min": 1, "max": 1}
    too_large = service_manifest(workplace, NAME, replicas=one, gpus=TOO_MANY)
    with operator.with_values("serving.enabled=true"), running_service(workplace, too_large) as service:
        message = wait_for("a replica that fits no node", 300, lambda: _unschedulable(service), every=1)
        assert message.startswith(f"the pod asks for {TOO_MANY} GPUs, ")
        (first,) = _clusters(service)
        service.kubectl.apply(service_manifest(workplace, NAME, replicas=one))

        def is_replaced() -> bool:
            clusters = _clusters(service)
            return bool(clusters) and first not in clusters

        wait_for("another Ray cluster instead of the first one", _SECONDS_TO_REPLACE, is_replaced, every=1)
        service.wait_until_ready(replicas=1)


def _unschedulable(service: RunningService) -> str:
    found = service.condition("ReplicasReady")
    return str(found["message"]) if found.get("reason") == "Unschedulable" and service.pods("replicas") else ""


def _clusters(service: RunningService) -> list[str]:
    return service.kubectl("get", "rayclusters", f"--selector=spotune.dev/service={NAME}", "--output=name").split()
