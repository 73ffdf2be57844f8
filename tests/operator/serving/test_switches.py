"""Which version a service switches to, in which cluster, and which pods go afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotune_operator.serving.gateway_stats import Traffic
from spotune_operator.serving.scaling import RayClusterView, WorkerGroup
from spotune_operator.serving.state import ServicePod
from tests.operator.serving.rollouts import NEW, OLD, STEPS, comparing, counted, rolled_back, rolling, served
from tests.operator.serving.scenario import ACTIVE, PENDING, Scenario, a_service


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


def test_another_prefix_of_a_bucket_is_a_rollout() -> None:
    scenario = Scenario(a_service(model={"source": "s3://models/llama/1/"}))
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=5)
    scenario.decide()
    scenario.edit(model={"source": "s3://models/llama/2"})
    assert scenario.weights() == {"llama/1": 100, "llama/2": 0}


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


def test_a_claim_that_is_not_mounted_needs_a_second_cluster() -> None:
    scenario = Scenario(a_service(model={"claim": {"name": "first", "path": "a"}}, rollout=STEPS))
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=1)
    scenario.decide()
    scenario.edit(model={"claim": {"name": "second", "path": "b"}}, rollout=STEPS)
    assert scenario.weights() == {"b": 100}
    assert scenario.condition("RolledOut").message == (
        "b replaces a in a second Ray cluster, without a comparison: the pods do not mount the claim second"
    )
    assert scenario.status.claims == ["second"]
    scenario.ray_service("DEPLOYING", pending_cluster=PENDING)
    assert scenario.weights() == {"b": 100}
    assert "do not mount the claim second" in scenario.condition("RolledOut").message
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
    assert scenario.weights() == {NEW: 100}, "the candidate runs in the first cluster, too: that is not the switch"
    assert scenario.status.model is not None
    assert scenario.status.model.version == OLD
    scenario.ray_service()
    child = scenario.observed.ray_service
    assert child is not None
    assert child.ray is not None
    scenario.observe(children={("RayService", child.name): replace(child, ray=replace(child.ray, is_current=False))})
    assert scenario.weights() == {NEW: 100}, "KubeRay has not seen the new spec, and reports the first cluster"


def test_a_rolled_back_version_is_not_deployed_by_a_second_cluster_either() -> None:
    scenario = comparing()
    scenario.traffic(step_240=counted(120, errors=50), step_120=counted(500))
    rolled_back(scenario)
    assert [each.version for each in scenario.status.retiring] == [NEW]
    scenario.edit(rollout=STEPS, resources={"requests": {"cpu": "3"}})
    assert scenario.weights() == {OLD: 100}
    assert scenario.status.retiring == [], "the first cluster keeps it, the second one never had it"


def test_a_resumed_service_starts_with_the_newest_version() -> None:
    scenario = comparing()
    scenario.observe(children={}, pods=[], traffic=Traffic())
    assert scenario.weights() == {NEW: 100}
    assert scenario.condition("RolledOut").message == f"{NEW} is being deployed"


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
