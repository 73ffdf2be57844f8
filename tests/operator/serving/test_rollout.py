"""Rollouts of a new version beside the served one, as repeated decisions of the operator see them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune.service import ReplicasSpec
from spotune_operator.children.serving.serve_config import APPLICATION
from spotune_operator.serving.gateway_stats import Histogram, VersionCounters, VersionStats
from spotune_operator.serving.rollout import replicas_at
from spotune_operator.serving.scaling import RayClusterView, WorkerGroup
from spotune_operator.serving.state import ApplicationState, ServicePod
from tests.operator.serving.scenario import ACTIVE, OUTPUT, PENDING, Scenario, a_service

OLD, NEW = "sql-0123abcd-step-120", "sql-0123abcd-step-240"
STEPS = {"steps": [20, 100], "pause": "60s", "promoteIf": {"minRequests": 20}}


def counted(
    requests: float, errors: float = 0, milliseconds: float = 15, weight: float = 0, running: float = 0, error: str = ""
) -> VersionStats:
    """A version with requests whose first token and other tokens all took this time."""
    bounds = [0.01, 0.02, 0.04, 0.08, float("inf")]
    latency = Histogram({bound: requests if bound >= milliseconds / 1000 else 0 for bound in bounds})
    return VersionStats(weight, error, running, VersionCounters(requests, errors, latency, latency))


def served(rollout: dict[str, Any] | None = None, **spec: Any) -> Scenario:
    """A service that serves the first version."""
    scenario = Scenario(a_service(**({"rollout": rollout} if rollout else {}), **spec))
    scenario.serves()
    return scenario


def rolling(rollout: dict[str, Any] | None = None, **spec: Any) -> Scenario:
    """A service whose candidate is running and ready, but has no requests yet."""
    scenario = served(rollout or STEPS, **spec)
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=10)
    scenario.traffic()
    return scenario


def comparing() -> Scenario:
    """A service whose candidate has just got its first requests."""
    scenario = rolling()
    assert scenario.weights() == {OLD: 80, NEW: 20}
    return scenario


def application(scenario: Scenario, version: Any) -> dict[str, Any]:
    found: dict[str, Any] = scenario.applications()[version.application]
    return found


def test_a_new_version_starts_beside_the_served_one_and_gets_no_request_before_it_runs() -> None:
    scenario = served()
    scenario.job(OUTPUT, 240, "Complete")
    before = scenario.observed.ray_service
    assert scenario.weights() == {OLD: 100, NEW: 0}
    scenario.ray_service("DEPLOYING")
    assert before is not None
    assert scenario.observed.ray_service is not None
    assert scenario.observed.ray_service.cluster_digest == before.cluster_digest, "KubeRay starts no second cluster"
    scenario.pods(head=1, gateway=1, replicas=2)
    scenario.traffic()
    assert scenario.weights() == {OLD: 100, NEW: 0}
    assert "is DEPLOYING" in scenario.condition("RolledOut").message
    assert scenario.status.phase == "Upgrading"
    assert scenario.condition("Ready").status == "True"


@pytest.mark.parametrize("missing", ["pods", "replicas", "gateway", "kuberay"])
def test_a_version_waits_for_its_pods_its_replicas_the_gateway_and_kuberay(missing: str) -> None:
    scenario = rolling()
    assert scenario.weights() == {OLD: 80, NEW: 20}
    scenario = served(STEPS)
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    scenario.ray_service()
    child = scenario.observed.ray_service
    assert child is not None
    assert child.ray is not None
    assert scenario.status.pending_model is not None
    scenario.pods(head=1, gateway=1, replicas=1 if missing == "pods" else 2)
    scenario.traffic()
    ray = child.ray
    if missing == "replicas":
        short = {scenario.status.pending_model.application: ApplicationState("RUNNING", is_complete=False)}
        ray = replace(ray, applications={**ray.applications, **short})
    if missing == "kuberay":
        ray = replace(ray, is_current=False)
    if missing == "gateway":
        scenario.observe(traffic=replace(scenario.observed.traffic, gateways=[]))
        scenario.observe(traffic=replace(scenario.observed.traffic, error="the gateway does not answer"))
    scenario.observe(children={("RayService", child.name): replace(child, ray=ray)})
    assert scenario.weights() == {OLD: 100, NEW: 0}
    assert scenario.status.rollout is not None
    assert scenario.status.rollout.reason


def test_by_default_all_requests_go_to_the_new_version_once_it_runs() -> None:
    scenario = rolling({"steps": [100]})
    assert scenario.weights() == {NEW: 100}
    assert scenario.status.model is not None
    assert scenario.status.model.version == NEW
    assert (scenario.status.pending_model, scenario.status.rollout) == (None, None)
    assert scenario.condition("RolledOut").reason == "Promoted"
    assert scenario.condition("RolledOut").status == "True"


def test_a_switch_at_once_needs_no_statistics() -> None:
    scenario = rolling({"steps": [100]})
    scenario = served({"steps": [100]})
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=2)
    assert scenario.weights() == {OLD: 100, NEW: 0}
    scenario.now += 61
    assert scenario.weights() == {NEW: 100}


def test_the_former_version_keeps_its_replicas_until_its_requests_have_ended() -> None:
    scenario = rolling({"steps": [100]}, replicas={"min": 3, "max": 3})
    former = scenario.status.model
    assert former is not None
    scenario.decide()
    assert [each.version for each in scenario.status.retiring] == [OLD]
    assert application(scenario, former)["deployments"] == [{"name": "Replica", "num_replicas": 3}]
    scenario.ray_service()
    scenario.traffic(step_120=counted(9, running=1))
    assert former.application in scenario.applications()
    scenario.traffic(step_120=counted(10))
    assert former.application not in scenario.applications()
    assert scenario.status.retiring == []
    assert scenario.condition("RolledOut").reason == "Promoted"


def test_the_former_version_is_removed_after_the_longest_request_at_the_latest() -> None:
    scenario = rolling({"steps": [100]}, requestTimeout="90s")
    scenario.decide()
    scenario.ray_service()
    scenario.traffic(step_120=counted(9, running=1), seconds=80)
    assert len(scenario.applications()) == 3
    scenario.now += 15
    assert len(scenario.applications()) == 2


def test_steps_advance_after_the_pause_with_enough_requests() -> None:
    scenario = comparing()
    scenario.traffic(step_240=counted(30), step_120=counted(120), seconds=50)
    assert scenario.weights() == {OLD: 80, NEW: 20}
    scenario.traffic(step_240=counted(19), step_120=counted(120), seconds=15)
    assert scenario.weights() == {OLD: 80, NEW: 20}
    assert "19 of 20 requests" in scenario.condition("RolledOut").message
    scenario.traffic(step_240=counted(30), step_120=counted(120))
    assert scenario.weights() == {OLD: 80, NEW: 20}, "its replicas for all requests are not started yet"
    scenario.ray_service()
    scenario.traffic(step_240=counted(40, weight=20), step_120=counted(150, weight=80))
    assert scenario.weights() == {NEW: 100}
    assert scenario.condition("RolledOut").message == (
        f"{NEW} gets all requests; error rate 0.0 % against 0.0 % over 40 requests, "
        "median time to the first token 15 ms against 15 ms"
    )


def test_a_candidate_has_replicas_for_its_share_and_all_of_them_before_it_gets_all_requests() -> None:
    scenario = rolling(replicas={"min": 4, "max": 4})
    scenario.decide()
    candidate = scenario.status.pending_model
    assert candidate is not None
    assert application(scenario, candidate)["deployments"][0]["num_replicas"] == 1
    scenario.traffic(step_240=counted(30), step_120=counted(120), seconds=65)
    assert application(scenario, candidate)["deployments"][0]["num_replicas"] == 4
    assert scenario.weights() == {OLD: 80, NEW: 20}


@pytest.mark.parametrize(("percent", "least", "most"), [(10, 1, 1), (50, 2, 5), (100, 3, 10)])
def test_replicas_of_a_share(percent: int, least: int, most: int) -> None:
    found = replicas_at(ReplicasSpec(min=3, max=10), percent)
    assert (found.min, found.max) == (least, most)
    assert replicas_at(ReplicasSpec(min=0, max=1), percent).min == 0


def test_without_requests_a_step_ends_after_three_pauses() -> None:
    scenario = comparing()
    scenario.traffic(seconds=175)
    assert scenario.weights() == {OLD: 80, NEW: 20}
    assert scenario.status.rollout is not None
    assert scenario.status.rollout.step == 20
    scenario.traffic(seconds=10)
    scenario.decide()
    scenario.ray_service()
    scenario.traffic()
    assert scenario.weights() == {NEW: 100}
    assert "it was not compared: it had no requests" in scenario.condition("RolledOut").message


def test_without_statistics_a_step_does_not_end() -> None:
    scenario = comparing()
    scenario.observe(traffic=replace(scenario.observed.traffic, error="the gateway does not answer"))
    scenario.now += 1000
    assert scenario.weights() == {OLD: 80, NEW: 20}
    assert "it cannot be compared: the gateway does not answer" in scenario.condition("RolledOut").message


def rolled_back(scenario: Scenario) -> str:
    """The message of the rollback; the served version gets all requests again."""
    assert scenario.weights() == {OLD: 100}
    condition = scenario.condition("RolledOut")
    assert (condition.status, condition.reason) == ("False", "RolledBack")
    assert scenario.status.rejected is not None
    assert scenario.status.rejected.version == NEW
    assert (scenario.status.rollout, scenario.status.pending_model) == (None, None)
    assert scenario.condition("Ready").status == "True"
    assert scenario.condition("Stalled").status == "False"
    return condition.message


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


def test_setting_the_model_back_cancels_the_rollout() -> None:
    paths = [{"claim": {"name": "models", "path": path}} for path in ("a", "b")]
    scenario = Scenario(a_service(model=paths[0], rollout=STEPS))
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=5)
    scenario.decide()
    scenario.edit(model=paths[1], rollout=STEPS)
    assert scenario.weights() == {"a": 100, "b": 0}
    scenario.ray_service()
    scenario.edit(model=paths[0], rollout=STEPS)
    assert scenario.weights() == {"a": 100}
    assert scenario.condition("RolledOut").message == "a gets all requests; the rollout of b was cancelled"


def test_another_revision_of_the_hub_is_a_rollout() -> None:
    scenario = Scenario(a_service(model={"source": "hf://a/b", "revision": "v1"}))
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=5)
    scenario.decide()
    scenario.edit(model={"source": "hf://a/b", "revision": "v2"})
    assert scenario.weights() == {"v1": 100, "v2": 0}


def test_versions_of_the_same_name_can_be_told_apart() -> None:
    scenario = Scenario(a_service(model={"claim": {"name": "models", "path": "a"}}))
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=5)
    scenario.decide()
    adapters = [{"name": "french", "claim": {"name": "models", "path": "french"}}]
    scenario.edit(model={"claim": {"name": "models", "path": "a"}}, adapters=adapters)
    first, second = scenario.weights()
    assert first == "a"
    assert second.startswith("a-")
    assert scenario.status.pending_model is not None
    assert scenario.status.pending_model.version == "a"


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


def test_a_claim_that_is_not_mounted_needs_a_second_cluster() -> None:
    scenario = Scenario(a_service(model={"claim": {"name": "first", "path": "a"}}, rollout=STEPS))
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=1)
    scenario.decide()
    scenario.edit(model={"claim": {"name": "second", "path": "b"}}, rollout=STEPS)
    assert scenario.weights() == {"b": 100}
    assert scenario.condition("RolledOut").message == (
        "b replaces it in a second Ray cluster, without a comparison: the pods do not mount the claim second"
    )
    assert scenario.status.claims == ["second"]
    scenario.ray_service("DEPLOYING", pending_cluster=PENDING)
    assert scenario.weights() == {"b": 100}
    assert scenario.status.model is not None
    assert scenario.status.model.version == "a"
    scenario.ray_service("RUNNING", active=PENDING)
    scenario.pods(PENDING, head=1, gateway=1, replicas=1)
    scenario.decide()
    assert (scenario.status.model.version, scenario.status.pending_model) == ("b", None)
    assert scenario.condition("RolledOut").status == "True"


def test_claims_stay_mounted_when_no_version_needs_them_any_longer() -> None:
    adapters = [{"name": "french", "claim": {"name": "adapters", "path": "french"}}]
    model = {"claim": {"name": "models", "path": "a"}}
    scenario = Scenario(a_service(model=model, adapters=adapters))
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=5)
    scenario.decide()
    digest = scenario.observed.ray_service.cluster_digest if scenario.observed.ray_service else ""
    scenario.edit(model=model)
    scenario.decide()
    scenario.ray_service()
    assert scenario.observed.ray_service is not None
    assert scenario.observed.ray_service.cluster_digest == digest
    assert scenario.status.claims == ["adapters", "models"]


def test_a_changed_pod_during_a_rollout_switches_by_a_second_cluster() -> None:
    scenario = comparing()
    scenario.ray_service()
    scenario.edit(rollout=STEPS, resources={"requests": {"cpu": "3"}})
    assert scenario.weights() == {NEW: 100}
    assert (scenario.status.rollout, scenario.status.retiring) == (None, [])
    assert scenario.status.model is not None
    assert scenario.status.model.version == OLD


def test_a_rolled_back_version_is_not_deployed_by_a_second_cluster_either() -> None:
    scenario = comparing()
    scenario.traffic(step_240=counted(120, errors=50), step_120=counted(500))
    rolled_back(scenario)
    scenario.edit(rollout=STEPS, resources={"requests": {"cpu": "3"}})
    assert scenario.weights() == {OLD: 100}


def the_pods(*names: str) -> list[ServicePod]:
    """Pods of the group spot, the oldest first."""
    return [
        ServicePod(name, "team", "answers", "replicas", ACTIVE, "spot", created=f"2027-01-0{day}T00:00:00Z", ready=True)
        for day, name in enumerate(names, 1)
    ]


@pytest.mark.parametrize(("reason", "deleted"), [("Promoted", "old"), ("RolledBack", "new")])
def test_the_pods_of_the_version_that_leaves_are_deleted(reason: str, deleted: str) -> None:
    scenario = comparing()
    if reason == "Promoted":
        scenario = rolling({"steps": [100]})
    else:
        scenario.traffic(step_240=counted(120, errors=50), step_120=counted(500))
    scenario.decide()
    assert scenario.condition("RolledOut").reason == reason
    groups = [WorkerGroup("gateway", 1, 1, 1), WorkerGroup("spot", 2, 2, 2)]
    scenario.observe(clusters=[RayClusterView("team", ACTIVE, "answers", groups)], pods=the_pods("old", "new"))
    scenario.now += 10_000
    (resize,) = scenario.decide().resize
    operations = {each["path"].rpartition("/")[2]: each["value"] for each in resize.operations}
    assert operations["replicas"] == 1
    assert operations["scaleStrategy"] == {"workersToDelete": [deleted]}


def test_names_of_deleted_pods_are_taken_off_the_list() -> None:
    scenario = served()
    groups = [WorkerGroup("gateway", 1, 1, 1), WorkerGroup("spot", 1, 1, 1, to_delete=["old"])]
    scenario.observe(clusters=[RayClusterView("team", ACTIVE, "answers", groups)], pods=the_pods("old", "new"))
    assert scenario.decide().resize == []
    scenario.observe(pods=the_pods("new"))
    (resize,) = scenario.decide().resize
    assert {"op": "add", "path": "/spec/workerGroupSpecs/1/scaleStrategy", "value": {"workersToDelete": []}} in (
        resize.operations
    )
