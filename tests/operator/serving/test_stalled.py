"""Decisions about ModelServices whose spec cannot be applied."""

from __future__ import annotations

from dataclasses import replace

from spotune_operator.errors import ProviderError
from spotune_operator.observe.nodes import NodeView
from spotune_operator.serving.decide import ServiceDecision, decide_stalled_service
from tests.operator.serving.scenario import SETTINGS, Scenario


def decide_stalled(scenario: Scenario) -> ServiceDecision:
    return decide_stalled_service(
        ProviderError("spec.cluster.provider", "is auto, but the nodes are from two clouds"),
        generation=2,
        previous=scenario.status,
        observed=scenario.observed,
        now=scenario.now,
        settings=scenario.settings,
    )


def serving_scenario() -> Scenario:
    scenario = Scenario(settings=replace(SETTINGS, heed_preemption=True))
    scenario.serves()
    return scenario


def test_the_endpoint_stays_ready() -> None:
    decision = decide_stalled(serving_scenario())
    conditions = {condition.type: condition.status for condition in decision.status.conditions}
    assert (conditions["Stalled"], conditions["Ready"], decision.status.phase) == ("True", "True", "Stalled")
    assert decision.requeue_after == SETTINGS.rejected_retry_seconds, "what the error is about may have changed"


def test_replicas_get_a_notice_when_the_cloud_reclaims_their_node() -> None:
    scenario = serving_scenario()
    pods = [replace(pod, node="n1") for pod in scenario.observed.pods]
    scenario.observe(pods=pods, nodes={"n1": NodeView("n1", reclaimed=True)})
    assert [pod.component for pod in decide_stalled(scenario).delete_gracefully] == ["replicas"]
    scenario.settings = SETTINGS
    assert not decide_stalled(scenario).delete_gracefully


def test_a_pod_on_a_dead_node_is_deleted_by_force() -> None:
    scenario = serving_scenario()
    lost = replace(scenario.observed.pods[0], node="dead", deleting_since=scenario.now, grace_seconds=30)
    scenario.observe(pods=[lost, *scenario.observed.pods[1:]])
    waiting = decide_stalled(scenario)
    assert not waiting.force_delete
    assert waiting.requeue_after is not None
    scenario.now += waiting.requeue_after * 2
    assert decide_stalled(scenario).force_delete == [lost]
