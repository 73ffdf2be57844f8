"""Decisions about the ModelService of a job with `spec.serving`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune_operator.kube.conditions import find
from spotune_operator.observe.job_services import JobService, job_service_view
from spotune_operator.reconcile.decide import Decision
from spotune_operator.settings import Settings
from tests.operator.support.scenarios import SETTINGS, Scenario, a_cluster_job

SERVES = replace(SETTINGS, serving=True)
SERVING = {"replicas": {"min": 0, "max": 2}}


def scenario_with(settings: Settings = SERVES, serving: dict[str, Any] | None = SERVING) -> Scenario:
    """A job with `spec.serving` that trains."""
    scenario = Scenario(a_cluster_job(**({"serving": serving} if serving is not None else {})), settings=settings)
    scenario.decide()
    scenario.trains()
    scenario.decide()
    return scenario


def trained(**given: Any) -> Scenario:
    """The same job, trained."""
    scenario = scenario_with(**given)
    scenario.supervisor_reports("Done", "trained", step=100)
    scenario.decide()
    return scenario


def service_exists(scenario: Scenario, name: str = "job", **changes: Any) -> None:
    service = JobService("default", name, "uid-s", "job", "uid-1", **changes)
    scenario.observe(services={name: service})


def services(decision: Decision) -> list[dict[str, Any]]:
    """The ModelServices that a decision applies."""
    return [manifest for manifest in decision.apply if manifest["kind"] == "ModelService"]


def test_service_is_created_when_the_model_is_trained() -> None:
    scenario = scenario_with()
    assert services(scenario.decide()) == []
    assert scenario.condition("Served").reason == "NotTrained"
    scenario.supervisor_reports("Done", "trained", step=100)
    (service,) = services(scenario.decide())
    assert service["spec"] == {"model": {"finetuneJob": "job"}, "replicas": {"min": 0, "max": 2}}
    assert service["metadata"]["name"] == "job"
    (owner,) = service["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("FinetuneJob", "uid-1", True)
    assert scenario.condition("Served").reason == "Creating"


def test_a_job_without_the_section_has_neither_service_nor_condition() -> None:
    scenario = trained(serving=None)
    assert services(scenario.decide()) == []
    assert find(scenario.status.conditions, "Served") is None


def test_served_has_the_url_of_a_ready_service() -> None:
    scenario = trained()
    service_exists(scenario, ready=True, reason="Serving", url="http://spotunems-job.default.svc")
    scenario.decide()
    assert scenario.is_true("Served")
    assert "http://spotunems-job.default.svc" in scenario.condition("Served").message


def test_served_has_the_reason_of_a_service_that_is_not_ready() -> None:
    scenario = trained()
    service_exists(scenario, reason="Unschedulable", message="no node has a GPU")
    scenario.decide()
    condition = scenario.condition("Served")
    assert (condition.status, condition.reason) == ("False", "Unschedulable")
    assert condition.message == "the ModelService job is not ready: no node has a GPU"
    assert scenario.is_true("Ready"), "the model is trained"


def test_service_stays_while_the_job_is_trained_further() -> None:
    scenario = trained()
    service_exists(scenario, ready=True)
    scenario.edit(a_cluster_job(serving=SERVING, training={"epochs": 5, "globalBatchSize": 96}))
    scenario.supervisor_reports(step=110)
    decision = scenario.decide()
    assert scenario.status.output == ""
    assert len(services(decision)) == 1
    assert decision.delete_services == []
    assert scenario.is_true("Served")


def test_removed_section_deletes_the_service_and_the_condition() -> None:
    scenario = trained()
    service_exists(scenario, ready=True)
    scenario.edit(a_cluster_job())
    decision = scenario.decide()
    assert [service.uid for service in decision.delete_services] == ["uid-s"]
    assert services(decision) == []
    assert find(scenario.status.conditions, "Served") is None
    assert scenario.is_true("Complete")


def test_another_name_replaces_the_service() -> None:
    scenario = trained()
    service_exists(scenario, ready=True)
    scenario.edit(a_cluster_job(serving={"name": "sql"}))
    decision = scenario.decide()
    assert [service.name for service in decision.delete_services] == ["job"]
    assert [service["metadata"]["name"] for service in services(decision)] == ["sql"]


def test_a_service_that_is_being_deleted_is_left_alone() -> None:
    scenario = trained()
    service_exists(scenario, deleting=True)
    decision = scenario.decide()
    assert services(decision) == []
    assert decision.delete_services == []


def test_without_serving_in_the_chart_the_condition_says_so_and_the_job_is_complete() -> None:
    scenario = trained(settings=SETTINGS)
    assert services(scenario.decide()) == []
    condition = scenario.condition("Served")
    assert (condition.status, condition.reason) == ("False", "ServingDisabled")
    assert "serving.enabled=true" in condition.message
    assert scenario.is_true("Complete")
    assert scenario.is_true("Ready")


def test_a_rejected_service_does_not_stall_the_training() -> None:
    scenario = scenario_with()
    scenario.observe(refused={"ModelService": "spec.serving.name: taken"})
    scenario.decide()
    assert not scenario.is_true("Stalled")
    assert scenario.condition("Served").reason == "Refused"
    assert scenario.condition("Served").message == "spec.serving.name: taken"


def test_a_change_of_the_section_leaves_the_pods_and_the_trainer_alone() -> None:
    scenario = scenario_with()
    before = scenario.job_file()
    pinned = scenario.status.pinned
    scenario.edit(a_cluster_job(serving={"gpus": 2}))
    decision = scenario.decide()
    assert scenario.job_file() == before
    assert decision.status.pinned == pinned
    assert decision.command == ""


@pytest.mark.parametrize("has_status", [True, False])
def test_the_view_of_a_service_resolves_references_between_its_conditions(has_status: bool) -> None:
    metadata = {"namespace": "n", "name": "s", "uid": "u", "labels": {"spotune.dev/job": "job"}}
    raw: dict[str, Any] = {"metadata": metadata, "spec": {}}
    if has_status:
        ready = {"type": "Ready", "status": "False", "reason": "DeployFailed", "message": "see condition Stalled"}
        stalled = {"type": "Stalled", "status": "True", "reason": "DeployFailed", "message": "no weights"}
        raw["status"] = {"conditions": [ready, stalled], "url": "http://x"}
    found = job_service_view(raw)
    assert (found.job, found.owner, found.ready) == ("job", "", False)
    assert found.message == ("no weights" if has_status else "")
