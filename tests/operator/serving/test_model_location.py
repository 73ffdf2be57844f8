"""Where the model of a service is."""

from typing import Any

import pytest

from tests.operator.serving.scenario import Scenario, a_service


def test_a_model_in_a_bucket_is_served_from_there_while_its_job_trains_on() -> None:
    scenario = Scenario()
    scenario.job("s3://bucket/sql/export", 120, "Complete")
    scenario.decide()
    served = scenario.status.pending_model
    assert served is not None
    assert served.location == "s3://bucket/sql/export"
    assert served.version.endswith("-step-120")
    scenario.job("", 130, "Training")
    scenario.decide()
    assert scenario.condition("ModelAvailable").status == "True"
    scenario.job("s3://bucket/sql/export", 240, "Complete")
    scenario.decide()
    assert scenario.status.pending_model is not None
    assert scenario.status.pending_model.version == served.version.replace("-step-120", "-step-240")


MISSING = "there is no PersistentVolumeClaim nope in this namespace: create it, or correct the name"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"claim": {"name": "nope", "path": "a"}}}, "spec.model.claim"),
        (
            {
                "model": {"claim": {"name": "models", "path": "a"}},
                "adapters": [
                    {"name": "french", "claim": {"name": "models", "path": "french"}},
                    {"name": "german", "claim": {"name": "nope", "path": "german"}},
                ],
            },
            "spec.adapters[1].claim",
        ),
    ],
    ids=["model", "adapter"],
)
def test_a_missing_claim_stalls_the_service_and_is_named_with_its_field(spec: dict[str, Any], field: str) -> None:
    scenario = Scenario(a_service(**spec))
    scenario.observe(missing_claims=["nope"])
    decision = scenario.decide()
    assert (decision.apply, decision.requeue_after) == ([], scenario.settings.rejected_retry_seconds)
    assert scenario.status.phase == "Stalled"
    for name in ("ModelAvailable", "Stalled"):
        found = scenario.condition(name)
        assert (found.reason, found.message) == ("ClaimNotFound", f"{field}: {MISSING}")
    scenario.observe(missing_claims=[])
    assert scenario.decide().apply
    assert scenario.condition("Stalled").status == "False"


def test_a_claim_that_could_not_be_looked_up_stops_nothing() -> None:
    scenario = Scenario(a_service(model={"claim": {"name": "models", "path": "a"}}))
    scenario.observe(missing_claims=None)
    decision = scenario.decide()
    assert decision.apply
    assert decision.requeue_after == scenario.settings.rejected_retry_seconds


def test_a_missing_claim_does_not_stall_a_suspended_service() -> None:
    scenario = Scenario(a_service(model={"claim": {"name": "nope", "path": "a"}}, suspend=True))
    scenario.observe(missing_claims=["nope"])
    scenario.decide()
    assert scenario.status.phase == "Suspended"
    assert scenario.condition("ModelAvailable").reason == "ClaimNotFound"
