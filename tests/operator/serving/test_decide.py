"""Decisions about ModelServices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from spotune.custom_resource.pod_problems import PodProblem
from spotune.service import ModelServiceStatus
from spotune_operator.children.serving import pods
from spotune_operator.observe.nodes import NodeView
from spotune_operator.serving.scaling import RayClusterView, WorkerGroup
from spotune_operator.serving.state import ServiceChild, ServicePod, TrainedModel
from tests.operator.serving.scenario import ACTIVE, OUTPUT, PENDING, SETTINGS, Scenario, a_service, kinds

HTTP_ROUTE = {"hostnames": ["sql.example.org"], "parentRefs": [{"name": "public"}]}


def test_nothing_is_applied_before_the_model_is_trained() -> None:
    scenario = Scenario()
    scenario.job(phase="Training")
    assert scenario.decide().apply == []
    assert scenario.status.phase == "WaitingForModel"
    assert scenario.condition("ModelAvailable").message == "waiting for the FinetuneJob sql to finish (phase Training)"
    assert scenario.condition("Reconciling").status == "True"
    assert scenario.condition("Stalled").status == "False"


def test_a_missing_job_is_named_with_its_field() -> None:
    scenario = Scenario()
    scenario.decide()
    assert scenario.condition("ModelAvailable").reason == "JobNotFound"
    assert "spec.model.finetuneJob: there is no FinetuneJob sql" in scenario.condition("ModelAvailable").message


def test_a_failed_job_stalls_the_service() -> None:
    scenario = Scenario()
    scenario.job(phase="Failed", has_failed=True)
    scenario.decide()
    assert scenario.status.phase == "Stalled"
    assert scenario.condition("Stalled").reason == "JobFailed"


def test_a_trained_model_is_served_from_the_volume_of_its_job() -> None:
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete")
    decision = scenario.decide()
    (ray_service,) = [manifest for manifest in decision.apply if manifest["kind"] == "RayService"]
    _, application = yaml.safe_load(ray_service["spec"]["serveConfigV2"])["applications"]
    assert application["args"]["directory"] == "/models/spotune-sql/team/sql-0123abcd/export"
    assert "spotune-sql" in json.dumps(ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"])
    assert scenario.status.model is None
    assert scenario.status.pending_model is not None
    assert scenario.status.pending_model.location == OUTPUT
    assert scenario.status.pending_model.version == "sql-0123abcd-step-120"


def test_a_pod_on_a_dead_node_is_checked_until_its_grace_period_is_over() -> None:
    scenario = Scenario()
    scenario.serves()
    lost = replace(scenario.observed.pods[0], node="n1", deleting_since=scenario.now, grace_seconds=30)
    scenario.observe(pods=[lost, *scenario.observed.pods[1:]], nodes={"n1": NodeView("n1", ready=False)})
    waiting = scenario.decide()
    assert not waiting.force_delete
    assert waiting.requeue_after is not None
    scenario.now += 60
    assert scenario.decide().force_delete == [lost]
    scenario.observe(nodes={"n1": NodeView("n1")})
    assert not scenario.decide().force_delete, "its kubelet runs and confirms the end"


def test_replicas_get_a_notice_when_the_cloud_reclaims_their_node() -> None:
    scenario = Scenario(settings=replace(SETTINGS, heed_preemption=True))
    scenario.serves()
    pods = [replace(pod, node="n1") for pod in scenario.observed.pods]
    scenario.observe(pods=pods, nodes={"n1": NodeView("n1", reclaimed=True)})
    assert [pod.component for pod in scenario.decide().delete_gracefully] == ["replicas"]
    scenario.settings = SETTINGS
    assert not scenario.decide().delete_gracefully


def test_the_former_version_is_served_until_the_new_one_is_ready() -> None:
    scenario = Scenario()
    scenario.serves()
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    assert scenario.condition("Reconciling").reason == "RollingOut"
    scenario.ray_service("DEPLOYING", pending_cluster=PENDING)
    scenario.pods(PENDING, head=1, gateway=1, replicas=1)
    scenario.decide()
    assert (scenario.condition("Ready").status, scenario.status.phase) == ("True", "Upgrading")
    assert (scenario.status.replicas, scenario.status.ready_replicas) == ("1/1", 1)
    assert scenario.status.model is not None
    assert scenario.status.pending_model is not None
    assert (scenario.status.model.version[-3:], scenario.status.pending_model.version[-3:]) == ("120", "240")
    scenario.ray_service("RUNNING", active=PENDING)
    scenario.decide()
    assert (scenario.status.phase, scenario.status.model.version[-3:]) == ("Serving", "240")
    assert scenario.status.pending_model is None


def test_a_new_version_that_fails_stalls_and_leaves_the_endpoint_ready() -> None:
    scenario = Scenario()
    scenario.serves()
    scenario.job(OUTPUT, 240, "Complete")
    scenario.ray_service("DEPLOY_FAILED", "JobError: no config.json", pending_cluster=PENDING)
    scenario.decide()
    assert scenario.condition("Ready").status == "True"
    assert scenario.condition("Stalled").message == "JobError: no config.json"


def test_a_model_that_cannot_be_loaded_stalls_the_service_with_the_error() -> None:
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete")
    trace = (
        "Traceback (most recent call last):\n  ...\nJobError: the model in /models/x cannot be loaded: no config.json\n"
    )
    scenario.ray_service("DEPLOY_FAILED", trace, active="", pending_cluster=ACTIVE)
    scenario.decide()
    assert scenario.condition("Stalled").message == "JobError: the model in /models/x cannot be loaded: no config.json"
    assert scenario.condition("Ready").message == "see condition Stalled"


def test_training_the_job_again_keeps_the_served_model() -> None:
    scenario = Scenario()
    scenario.serves()
    scenario.job("", 10, "Training")
    decision = scenario.decide()
    assert "RayService" in kinds(decision)
    assert scenario.condition("Ready").status == "True"
    assert scenario.status.model is not None
    assert scenario.status.model.version == "sql-0123abcd-step-120"


def test_a_newly_trained_model_changes_the_application() -> None:
    scenario = Scenario()
    scenario.serves()
    before = scenario.decide().apply
    scenario.job(OUTPUT, 240, "Complete")
    after = scenario.decide().apply
    assert before != after
    assert scenario.status.pending_model is not None
    assert scenario.status.pending_model.version == "sql-0123abcd-step-240"


def test_another_job_is_waited_for_while_the_former_model_is_served() -> None:
    scenario = Scenario()
    scenario.serves()
    scenario.edit(model={"finetuneJob": "other"})
    assert scenario.decide().apply == []
    assert scenario.condition("ModelAvailable").reason == "JobNotFound"
    assert scenario.condition("Ready").status == "True"
    assert scenario.condition("Reconciling").status == "True"
    assert scenario.status.model is not None
    assert scenario.status.model.location == OUTPUT


def test_an_adapter_that_is_not_trained_is_named_with_its_field() -> None:
    scenario = Scenario(a_service(adapters=[{"name": "french", "finetuneJob": "fr"}]))
    scenario.job(OUTPUT, 120, "Complete")
    assert scenario.decide().apply == []
    assert "spec.adapters[0].finetuneJob" in scenario.condition("ModelAvailable").message


def test_training_an_adapter_again_keeps_the_served_one() -> None:
    scenario = Scenario(a_service(adapters=[{"name": "french", "finetuneJob": "fr"}]))
    scenario.serves()
    base = scenario.observed.jobs["sql"]
    scenario.observe(jobs={"sql": base, "fr": TrainedModel("pvc://spotune-fr/team/fr-89abcdef/export", 7, "Complete")})
    scenario.decide()
    scenario.observe(jobs={"sql": base, "fr": TrainedModel("", 3, "Training")})
    assert "RayService" in kinds(scenario.decide())
    assert scenario.condition("ModelAvailable").status == "True"
    assert scenario.status.adapters["french"].version == "fr-89abcdef-step-7"


def test_suspending_deletes_the_ray_service_and_keeps_the_rest() -> None:
    scenario = Scenario()
    scenario.serves()
    scenario.edit(suspend=True)
    decision = scenario.decide()
    assert [child.kind for child in decision.delete] == ["RayService"]
    assert "RayService" not in kinds(decision)
    assert "Service" in kinds(decision)
    assert scenario.status.phase == "Suspending"
    scenario.observe(children={}, pods=[])
    assert scenario.decide().delete == []
    assert scenario.status.phase == "Suspended"
    scenario.edit()
    assert "RayService" in kinds(scenario.decide())


@pytest.mark.parametrize(
    ("field", "kind", "content"),
    [("ingress", "Ingress", {"host": "sql.example.org"}), ("httpRoute", "HTTPRoute", HTTP_ROUTE)],
)
def test_a_removed_ingress_or_route_is_deleted(field: str, kind: str, content: dict[str, Any]) -> None:
    scenario = Scenario(a_service(**{field: content}))
    scenario.serves()
    assert kind in kinds(scenario.decide())
    child = ServiceChild(kind, "team", "spotunems-answers", "uid-i", "answers", "1")
    scenario.observe(children={**scenario.observed.children, (kind, child.name): child})
    assert scenario.decide().delete == []
    scenario.edit()
    assert scenario.decide().delete == [child]


def test_the_image_stays_when_the_operator_is_upgraded() -> None:
    scenario = Scenario()
    scenario.serves()
    before = scenario.decide().apply
    scenario.settings = replace(scenario.settings, serve_image="spotune/serve:2")
    assert scenario.decide().apply == before
    assert scenario.status.image == "spotune/serve:1"


def test_an_upgraded_operator_starts_no_second_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(a_service(replicas={"min": 1, "max": 1}))
    scenario.serves()
    before = scenario.decide().apply
    monkeypatch.setitem(pods._LOGS, "RAY_NEW_SETTING", "1")
    assert scenario.decide().apply == before
    assert scenario.status.phase == "Serving"
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    assert scenario.condition("RolledOut").reason == "InProgress"
    assert "second Ray cluster" not in scenario.condition("RolledOut").message
    scenario.edit(resources={"requests": {"memory": "9Gi"}})
    assert "RAY_NEW_SETTING" in json.dumps(scenario.decide().apply)
    assert "second Ray cluster" in scenario.condition("RolledOut").message
    pinned = scenario.status.pinned
    assert pinned is not None
    assert "RAY_NEW_SETTING" in pinned.ray_cluster


def test_a_suspended_service_starts_again_with_the_templates_of_this_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario()
    scenario.serves()
    scenario.edit(suspend=True)
    scenario.decide()
    scenario.observe(children={}, pods=[])
    scenario.decide()
    assert scenario.status.pinned is None
    monkeypatch.setitem(pods._LOGS, "RAY_NEW_SETTING", "1")
    scenario.edit()
    assert "RAY_NEW_SETTING" in json.dumps(scenario.decide().apply)


def test_an_image_of_the_spec_replaces_the_pinned_one() -> None:
    scenario = Scenario()
    scenario.serves()
    scenario.edit(cluster={"provider": "none", "image": "spotune/serve:2"})
    scenario.decide()
    assert scenario.status.image == "spotune/serve:2"
    scenario.edit()
    scenario.decide()
    assert scenario.status.image == "spotune/serve:1"


def test_a_causal_model_on_gpus_gets_the_image_with_vllm_which_stays() -> None:
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete", task="causal")
    scenario.edit(gpus=1)
    scenario.ray_service()
    assert scenario.status.image == "spotune/serve-vllm:1"
    scenario.settings = replace(scenario.settings, serve_vllm_image="spotune/serve-vllm:2")
    before = scenario.decide().apply
    assert scenario.status.image == "spotune/serve-vllm:1"
    scenario.observe(jobs={})  # the job is deleted, and its model is still served
    assert scenario.decide().apply == before
    scenario.edit(gpus=0)
    scenario.decide()
    assert scenario.status.image == "spotune/serve:1"


def test_an_encoder_decoder_model_on_gpus_keeps_the_image_without_vllm() -> None:
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete", task="seq2seq")
    scenario.edit(gpus=1)
    scenario.ray_service()
    scenario.observe(jobs={})
    scenario.decide()
    assert scenario.status.image == "spotune/serve:1"


def test_a_service_of_an_operator_with_one_image_keeps_that_one() -> None:
    scenario = Scenario(status=ModelServiceStatus(default_image="spotune/serve:0", default_ray_version="2.60.0"))
    scenario.job(OUTPUT, 120, "Complete", task="causal")
    scenario.edit(gpus=1)
    scenario.decide()
    assert scenario.status.image == "spotune/serve:0"


@pytest.mark.parametrize(("reason", "stalls"), [("ErrImagePull", True), ("Unschedulable", False)])
def test_a_pod_problem_stalls_the_service_if_only_a_person_can_help(reason: str, stalls: bool) -> None:
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete")
    scenario.ray_service("", active="", pending_cluster=ACTIVE)
    pod = ServicePod("head", "team", "answers", "head", ACTIVE, problem=PodProblem(reason, "what the kubelet reports"))
    scenario.observe(pods=[pod])
    scenario.decide()
    assert (scenario.condition("Stalled").status == "True") is stalls
    assert scenario.condition("ReplicasReady").message == "what the kubelet reports"


def test_a_refused_child_is_tried_again() -> None:
    scenario = Scenario()
    scenario.serves()
    scenario.observe(refused={"Ingress": "the host is taken"})
    assert scenario.decide().requeue_after == scenario.settings.rejected_retry_seconds
    assert "rejected the Ingress: the host is taken" in scenario.condition("Stalled").message


@pytest.mark.parametrize("message", ["404 page not found", "the server could not find the requested resource"])
def test_without_the_gateway_api_the_service_answers_and_the_condition_names_the_remedy(message: str) -> None:
    scenario = Scenario(a_service(httpRoute=HTTP_ROUTE))
    scenario.serves()
    scenario.observe(refused={"HTTPRoute": message})
    scenario.decide()
    assert scenario.condition("Stalled").reason == "Refused"
    assert "needs the Gateway API (v1): install it with a" in scenario.condition("Stalled").message
    assert scenario.condition("Ready").status == "True"


def test_an_http_route_that_a_gateway_does_not_accept_stalls_the_service() -> None:
    scenario = Scenario(a_service(httpRoute=HTTP_ROUTE))
    scenario.serves()
    reason = "the Gateway public does not accept the HTTPRoute: UnsupportedValue: timeouts are not supported"
    route = ServiceChild("HTTPRoute", "team", "spotunems-answers", "uid-r", "answers", "1", not_accepted=reason)
    scenario.observe(children={**scenario.observed.children, ("HTTPRoute", route.name): route})
    scenario.decide()
    stalled = scenario.condition("Stalled")
    assert (stalled.status, stalled.reason, stalled.message) == ("True", "RouteNotAccepted", reason)
    assert scenario.condition("Ready").status == "True"


def test_a_service_that_scaled_to_zero_is_ready() -> None:
    scenario = Scenario(a_service(replicas={"min": 0, "max": 3}))
    scenario.job(OUTPUT, 120, "Complete")
    scenario.ray_service()
    scenario.pods(head=1, gateway=1)
    scenario.decide()
    assert scenario.condition("Ready").status == "True"
    assert scenario.condition("ReplicasReady").message == "scaled to zero: the next request starts a replica"


def a_cluster(*groups: WorkerGroup) -> RayClusterView:
    return RayClusterView("team", "spotunems-answers-abcde", "answers", groups)


def test_more_replicas_are_patched_into_the_running_cluster() -> None:
    scenario = Scenario(a_service(capacity="spot", replicas={"min": 1, "max": 1}))
    scenario.serves()
    running = a_cluster(WorkerGroup("gateway", 1, 1, 1), WorkerGroup("spot", 1, 1, 1))
    scenario.observe(clusters=[running])
    assert scenario.decide().resize == []
    scenario.edit(capacity="spot", replicas={"min": 3, "max": 3})
    (resize,) = scenario.decide().resize
    assert resize.cluster == running
    assert resize.operations == [
        {"op": "test", "path": "/spec/workerGroupSpecs/1/groupName", "value": "spot"},
        *(
            {"op": "add", "path": f"/spec/workerGroupSpecs/1/{name}", "value": 3}
            for name in ("minReplicas", "maxReplicas", "replicas")
        ),
    ]


def test_the_autoscaler_keeps_its_number_of_pods() -> None:
    scenario = Scenario(a_service(capacity="spot", replicas={"min": 1, "max": 4}))
    scenario.serves()
    scenario.observe(clusters=[a_cluster(WorkerGroup("gateway", 1, 1, 1), WorkerGroup("spot", 3, 1, 4))])
    assert scenario.decide().resize == []
    scenario.edit(capacity="spot", replicas={"min": 2, "max": 8})
    (resize,) = scenario.decide().resize
    assert [operation["path"].rpartition("/")[2] for operation in resize.operations] == [
        *("groupName", "minReplicas", "maxReplicas")
    ]


def test_a_cluster_with_other_groups_is_left_to_kuberay() -> None:
    scenario = Scenario(a_service(capacity="mixed", replicas={"min": 2, "max": 2}))
    scenario.serves()
    scenario.observe(clusters=[a_cluster(WorkerGroup("gateway", 1, 1, 1), WorkerGroup("spot", 1, 1, 1))])
    assert scenario.decide().resize == []
