"""Decisions about the claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune_operator.observe.state import Child, Observed
from tests.operator.support.scenarios import Scenario, a_cluster_job


def claim_of(scenario: Scenario) -> dict[str, Any]:
    """The spec of the claim in the next decision."""
    (found,) = [each for each in scenario.decide().apply if each["kind"] == "PersistentVolumeClaim"]
    return dict(found["spec"])


def a_claim(storage_class: str) -> dict[str, Child]:
    found = Child("PersistentVolumeClaim", "default", "spotune-job", "uid-c", "job", "1", storage_class=storage_class)
    return {"PersistentVolumeClaim": found}


IN_A_BUCKET = a_cluster_job(
    model={"source": "hf://google-t5/t5-small", "task": "seq2seq"},
    dataset={"train": {"source": "s3://data/shards"}},
    storage={"bucket": "s3://bucket/job"},
)


def test_job_in_a_bucket_has_no_claim_and_needs_no_class() -> None:
    scenario = Scenario(IN_A_BUCKET, observed=Observed(storage_classes={}))
    assert "PersistentVolumeClaim" not in {each["kind"] for each in scenario.decide().apply}
    ready = scenario.condition("StorageReady")
    assert (ready.status, ready.reason, ready.message) == ("True", "Bucket", "the job is kept in s3://bucket/job")


def test_bucket_that_cannot_be_used_is_shown_before_there_are_workers() -> None:
    scenario = Scenario(IN_A_BUCKET)
    scenario.decide()
    scenario.has_children()
    scenario.has_pods()
    checks = [{"name": "bucket", "status": "failed", "message": "storage.bucket: access is denied"}]
    scenario.supervisor_reports("Starting", "preflight", passed=False, checks=checks)
    (cluster,) = [each for each in scenario.decide().apply if each["kind"] == "RayCluster"]
    assert [group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]] == [0]
    assert scenario.condition("StorageReady").reason == "BucketUnusable"
    assert scenario.condition("PreflightPassed").message == "bucket: storage.bucket: access is denied"


def test_claim_keeps_its_class_without_a_class_in_the_spec() -> None:
    scenario = Scenario(a_cluster_job(cluster={"provider": "aks"}, storage={"size": "10Gi"}), observed=Observed())
    first = claim_of(scenario)
    assert first["storageClassName"] == "azurefile-csi-nfs"
    scenario.observe(children=a_claim("azurefile-csi-nfs"))
    assert claim_of(scenario) == first, "leaving the class out would remove it, which the API server rejects"


def test_default_class_of_another_version_does_not_change_a_claim() -> None:
    scenario = Scenario(a_cluster_job(cluster={"provider": "gke"}, storage={"size": "10Gi"}), observed=Observed())
    scenario.observe(children=a_claim("an-earlier-one"))
    assert claim_of(scenario)["storageClassName"] == "an-earlier-one"


def test_class_set_by_the_api_server_stays() -> None:
    scenario = Scenario(a_cluster_job(storage={"size": "10Gi"}), observed=Observed())
    assert "storageClassName" not in claim_of(scenario)
    scenario.observe(children=a_claim("the-default-one"))
    assert claim_of(scenario)["storageClassName"] == "the-default-one"


@pytest.mark.parametrize("there", ["shared", "another"])
def test_class_of_the_spec_is_applied(there: str) -> None:
    """If the claim has another class, the API server rejects the change, and the status reports it."""
    scenario = Scenario(a_cluster_job())
    scenario.observe(children=a_claim(there))
    assert claim_of(scenario)["storageClassName"] == "shared"


def test_larger_size_is_applied() -> None:
    scenario = Scenario(a_cluster_job(cluster={"provider": "aks"}, storage={"size": "10Gi"}), observed=Observed())
    scenario.observe(
        children={"PersistentVolumeClaim": replace(a_claim("x")["PersistentVolumeClaim"], capacity="10Gi")}
    )
    scenario.edit(a_cluster_job(cluster={"provider": "aks"}, storage={"size": "20Gi"}))
    assert claim_of(scenario)["resources"] == {"requests": {"storage": "20Gi"}}


def a_job_with_a_claim(**sections: Any) -> Scenario:
    return Scenario(a_cluster_job(storage={"existingClaim": "mine"}, **sections), observed=Observed())


def test_missing_claim_stalls_a_job_whose_pods_wait_for_it() -> None:
    scenario = a_job_with_a_claim()
    scenario.observe(missing_claims=["mine"])
    decision = scenario.decide()
    assert {each["kind"] for each in decision.apply} >= {"ConfigMap", "RayCluster"}, "its pods start once it exists"
    assert (decision.status.phase, scenario.condition("Stalled").reason) == ("Stalled", "ClaimNotFound")
    assert decision.requeue_after == pytest.approx(scenario.settings.rejected_retry_seconds, abs=1.0)
    scenario.observe(missing_claims=[])
    decision = scenario.decide()
    assert (decision.status.phase, scenario.is_true("Stalled")) == ("Provisioning", False)
    assert decision.requeue_after == pytest.approx(scenario.job.spec.retry.hang_timeout.seconds, abs=1.0)


def test_missing_claim_of_a_suspended_job_is_shown_and_does_not_stall_it() -> None:
    scenario = a_job_with_a_claim(suspend=True)
    scenario.observe(missing_claims=["mine"])
    assert scenario.decide().status.phase == "Suspended"
    assert (scenario.condition("StorageReady").reason, scenario.is_true("Stalled")) == ("ClaimNotFound", False)


def test_claim_that_could_not_be_looked_up_stops_nothing() -> None:
    scenario = a_job_with_a_claim()
    scenario.observe(missing_claims=None)
    decision = scenario.decide()
    assert (decision.status.phase, scenario.condition("StorageReady").reason) == ("Provisioning", "ExistingClaim")
    assert decision.requeue_after == pytest.approx(scenario.settings.rejected_retry_seconds, abs=1.0)
