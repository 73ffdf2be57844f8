"""New versions that are rolled back: by errors, latency, failed starts and the metric of their job."""

from __future__ import annotations

import pytest

from spotune_operator.children.serving.serve_config import APPLICATION
from spotune_operator.serving.state import ApplicationState
from tests.operator.serving.rollouts import NEW, OLD, STEPS, comparing, counted, rolled_back, served
from tests.operator.serving.scenario import OUTPUT, Scenario, a_service


def test_too_many_errors_roll_back_at_once() -> None:
    scenario = comparing()
    scenario.traffic(step_240=counted(120, errors=5), step_120=counted(500, errors=1))
    assert rolled_back(scenario) == "rolled back: error rate 4.2 % against 0.2 % over 120 requests"


def test_errors_that_the_served_version_has_too_are_no_reason() -> None:
    scenario = comparing()
    scenario.traffic(step_240=counted(100, errors=5), step_120=counted(500, errors=22))
    assert scenario.weights() == {OLD: 80, NEW: 20}


def test_a_slower_version_is_rolled_back_at_the_end_of_its_step() -> None:
    scenario = comparing()
    slow = counted(40, milliseconds=70)
    scenario.traffic(step_240=slow, step_120=counted(200))
    assert scenario.weights() == {OLD: 80, NEW: 20}
    scenario.traffic(step_240=slow, step_120=counted(200), seconds=65)
    assert rolled_back(scenario) == "rolled back: median time to the first token 60 ms against 15 ms over 40 requests"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (ApplicationState("DEPLOY_FAILED", "Traceback\nJobError: no config.json"), "JobError: no config.json"),
        (
            ApplicationState(
                "DEPLOYING",
                "A replica failed to start with exception. Retrying 17 more time(s). Error:\nno config.json",
            ),
            "its replicas fail to start: no config.json",
        ),
    ],
)
def test_a_version_that_cannot_start_is_rolled_back(state: ApplicationState, reason: str) -> None:
    scenario = served(STEPS)
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    assert scenario.status.pending_model is not None
    scenario.ray_service(failed={scenario.status.pending_model.application: state})
    assert reason in rolled_back(scenario)


def test_a_replica_that_failed_to_start_once_is_no_reason() -> None:
    scenario = served(STEPS)
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    assert scenario.status.pending_model is not None
    message = "A replica failed to start with exception. Retrying 19 more time(s). Error:\nthe node was lost"
    state = ApplicationState("DEPLOYING", message)
    scenario.ray_service(failed={scenario.status.pending_model.application: state})
    assert scenario.weights() == {OLD: 100, NEW: 0}


def test_an_unhealthy_version_is_rolled_back_after_a_minute() -> None:
    scenario = comparing()
    scenario.decide()
    assert scenario.status.pending_model is not None
    state = ApplicationState("UNHEALTHY", "replicas died")
    scenario.ray_service(failed={scenario.status.pending_model.application: state})
    scenario.decide()
    scenario.now += 30
    assert scenario.weights() == {OLD: 80, NEW: 20}
    scenario.now += 30
    assert "its replicas are unhealthy for 60 s: replicas died" in rolled_back(scenario)


def test_a_model_that_the_gateway_cannot_read_is_rolled_back() -> None:
    scenario = served(STEPS)
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    scenario.ray_service("DEPLOYING")
    scenario.traffic(step_240=counted(0, error="JobError: there is no tokenizer.json"))
    message = rolled_back(scenario)
    assert message == "rolled back: the gateway cannot read the model: JobError: there is no tokenizer.json"


def test_a_rolled_back_version_finishes_its_requests_and_is_not_tried_again() -> None:
    scenario = comparing()
    scenario.traffic(step_240=counted(120, errors=50, running=2), step_120=counted(500))
    rolled_back(scenario)
    scenario.ray_service()
    scenario.decide()
    assert scenario.status.phase == "RolledBack"
    scenario.traffic(step_240=counted(120, errors=50, running=2))
    assert len(scenario.applications()) == 3
    scenario.traffic(step_240=counted(122, errors=50))
    assert len(scenario.applications()) == 2
    scenario.now += 10_000
    rolled_back(scenario)


def test_a_newer_version_and_a_changed_rollout_are_tried_after_a_rollback() -> None:
    scenario = comparing()
    scenario.traffic(step_240=counted(120, errors=50), step_120=counted(500))
    rolled_back(scenario)
    same = scenario.status
    scenario.edit(rollout={"steps": [10, 100]})
    assert scenario.weights() == {OLD: 90, NEW: 10}, "its replicas have not ended yet"
    assert scenario.status.rejected is None
    scenario.status = same
    scenario.edit(rollout=STEPS)
    rolled_back(scenario)
    scenario.job(OUTPUT, 360, "Complete")
    assert scenario.weights() == {OLD: 100, "sql-0123abcd-step-360": 0}


def test_a_candidate_that_is_replaced_by_a_newer_one_finishes_its_requests() -> None:
    scenario = comparing()
    scenario.ray_service()
    scenario.job(OUTPUT, 360, "Complete")
    assert scenario.weights() == {OLD: 100, "sql-0123abcd-step-360": 0}
    assert [each.version for each in scenario.status.retiring] == [NEW]


def test_a_worse_metric_keeps_the_new_version_from_any_request() -> None:
    better = {"steps": [100], "promoteIf": {"metric": "exactMatch", "notWorseBy": 0.05}}
    scenario = Scenario(a_service(rollout=better))
    scenario.serves(exactMatch=0.80, loss=1.0)
    scenario.job(OUTPUT, 240, "Complete", scores={"exactMatch": 0.70, "loss": 0.5})
    assert set(scenario.applications()) == {
        APPLICATION,
        *([scenario.status.model.application] if scenario.status.model else []),
    }
    assert rolled_back(scenario) == "rolled back: exactMatch 0.7 against 0.8; it got no requests"
    scenario.job(OUTPUT, 360, "Complete", scores={"exactMatch": 0.77, "loss": 2.0})
    assert scenario.weights() == {OLD: 100, "sql-0123abcd-step-360": 0}


def test_the_metric_of_the_served_version_is_remembered_while_the_job_trains_on() -> None:
    scenario = Scenario(a_service(rollout={"promoteIf": {"metric": "loss"}}))
    scenario.serves(loss=1.0)
    scenario.job("", 130, "Training", scores={"loss": 0.2})
    scenario.decide()
    scenario.job(OUTPUT, 240, "Complete", scores={"loss": 1.2})
    assert rolled_back(scenario) == "rolled back: loss 1.2 against 1; it got no requests"


def test_a_metric_that_the_job_does_not_report_is_named_with_its_field() -> None:
    scenario = Scenario(a_service(rollout={"promoteIf": {"metric": "bleu"}}))
    scenario.serves(loss=1.0, exactMatch=0.5)
    assert scenario.condition("Ready").status == "True", "the first version has nothing to be compared with"
    scenario.job(OUTPUT, 240, "Complete", scores={"loss": 1.0, "exactMatch": 0.5})
    assert scenario.weights() == {OLD: 100}
    assert scenario.condition("Stalled").message == (
        "spec.rollout.promoteIf.metric: the FinetuneJob sql does not report bleu; its metrics are exactMatch, loss"
    )
    assert scenario.condition("Ready").status == "True"
    scenario.edit(rollout={"promoteIf": {"metric": "loss"}})
    assert scenario.weights() == {OLD: 100, NEW: 0}
