"""A service takes a GPU of a training job by an ordinary PriorityClass, and the job loses no step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster.faults.catalogue import with_a_gpu
from tests.cluster.faults.elastic import MANY, RARELY, trains_with
from tests.cluster.finetune_jobs import SMALL, Workplace
from tests.cluster.model_services import RunningService, add_model, running_service, service_manifest
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

_CLASS = "serving-first"


def test_a_replica_takes_the_gpu_of_a_worker(
    cluster: ClusterUnderTest, operator: Operator, workplace: Workplace
) -> None:
    """The job gets a notice, commits, and continues with fewer workers; it grows again when the service is gone."""
    cluster.machine_for("GPUs that can be counted")
    add_model(workplace)
    holder = with_a_gpu(cluster.image)
    workers = {"count": 2, "min": 1, "resources": SMALL, "resizeCooldown": "5s", "podTemplate": holder}
    job_manifest = workplace.manifest(
        "preempted", training={"maxSteps": MANY}, checkpoint={"every": RARELY}, workers=workers
    )
    urgent = service_manifest(workplace, "urgent", gpus=1, priorityClassName=_CLASS, replicas={"min": 1, "max": 1})
    with (
        _priority_class(cluster.kubectl),
        operator.with_values("serving.enabled=true"),
        workplace.running(job_manifest) as job,
    ):
        two = job.wait_for_progress("2 workers train", lambda seen: _trains(seen, 2))
        with running_service(workplace, urgent) as service:
            one = trains_with(job, 1, after=two)
            assert one["stepsLost"] == 0
            assert (one["restarts"]["preempted"], sum(one["restarts"].values())) == (1, 1)
            replica = wait_for("the replica's container", 300, lambda: _running_replica(service), every=1)
            assert replica["spec"]["priority"] > 0
            assert replica["spec"]["nodeName"] not in {pod["spec"].get("nodeName") for pod in job.pods("workers")}
        again = trains_with(job, 2, after=one)
        assert again["stepsLost"] == 0


def _trains(progress: dict[str, Any], workers: int) -> bool:
    return progress.get("phase") == "Training" and progress["workers"]["running"] == workers


def _running_replica(service: RunningService) -> dict[str, Any] | None:
    running = (pod for pod in service.pods("replicas") if pod["status"].get("phase") == "Running")
    return next(running, None)


@contextmanager
def _priority_class(kubectl: Kubectl) -> Iterator[None]:
    kubectl.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": _CLASS},
            "value": 1000,
            "description": "Above training, which has none.",
        }
    )
    try:
        yield
    finally:
        kubectl("delete", "priorityclass", _CLASS)
