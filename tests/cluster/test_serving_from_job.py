"""A FinetuneJob with `serving` on a real Kubernetes: its model answers a client of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster.finetune_jobs import SECONDS_TO_TRAIN, SMALL, RunningJob, Workplace
from tests.cluster.model_services import SECONDS_TO_SERVE, RunningService, admit_kuberay, delete_pods
from tests.cluster.operator_install import Operator
from tests.cluster.rights import refused

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3000)]

JOB = "trained-and-served"
NAME = "answers-of-the-job"


@pytest.fixture(scope="module")
def job(operator: Operator, workplace: Workplace) -> Iterator[RunningJob]:
    """The job, trained, with its service."""
    pods = {"cluster": {"provider": "aks" if workplace.cluster.machine else "none", "image": workplace.cluster.image}}
    serving = {"name": NAME, "gpus": 0, "resources": SMALL, "gateway": {"resources": SMALL}, **pods}
    service = RunningService(workplace.kubectl, NAME)
    with operator.with_values("serving.enabled=true"):
        admit_kuberay(workplace, service)
        with workplace.running(workplace.manifest(JOB, serving=serving)) as found:
            seconds = SECONDS_TO_TRAIN + SECONDS_TO_SERVE
            wait_for("condition Served", seconds, lambda: served(found).get("status") == "True", every=1)
            yield found
        delete_pods(service)


@pytest.fixture(scope="module")
def service(job: RunningJob) -> RunningService:
    return RunningService(job.workplace.kubectl, NAME)


def served(job: RunningJob) -> dict[str, Any]:
    """The condition `Served` of the job; {} before there is one."""
    status = job.workplace.kubectl.get("finetunejob", JOB).get("status", {})
    return next((each for each in status.get("conditions", []) if each["type"] == "Served"), {})


def test_the_model_of_the_job_answers(job: RunningJob, service: RunningService) -> None:
    assert service.status()["url"] in served(job)["message"]
    with service.client() as client:
        assert [model.id for model in client.models.list()] == [NAME]
        answer = client.completions.create(model=NAME, prompt="name of the singer", max_tokens=8, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_change_of_the_service_is_undone(job: RunningJob, service: RunningService) -> None:
    service.kubectl("patch", "modelservice", NAME, "--type=merge", '--patch={"spec": {"gpus": 1}}')
    wait_for("gpus: 0", 60, lambda: service.kubectl.get("modelservice", NAME)["spec"]["gpus"] == 0, every=1)


def test_the_service_goes_with_its_section(
    cluster: ClusterUnderTest, operator: Operator, job: RunningJob, service: RunningService
) -> None:
    service.kubectl("patch", "finetunejob", JOB, "--type=merge", '--patch={"spec": {"serving": null}}')
    gone = lambda: not service.kubectl("get", "modelservice", NAME, "--ignore-not-found", "--output=name")  # noqa: E731
    wait_for("the deletion of the service", 60, gone, every=1)
    wait_for("no condition Served", 60, lambda: not served(job), every=1)
    assert not refused(cluster.machine_for("the audit log").files.audit_log, operator.replaced)
