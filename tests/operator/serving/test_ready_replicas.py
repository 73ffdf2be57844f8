"""A service is ready once replicas have loaded their model: what Ray Serve reports, as far as it is known."""

from __future__ import annotations

from dataclasses import replace

from spotune.units.timestamps import rfc3339
from spotune_operator.serving.gateway_stats import UNPLACED_SECONDS, GatewayStats, Traffic
from tests.operator.serving.scenario import ACTIVE, OUTPUT, Scenario, a_service


def test_a_service_is_ready_once_gateway_and_replicas_are() -> None:
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete")
    scenario.ray_service("DEPLOYING", active="", pending_cluster=ACTIVE)
    scenario.pods(head=1, gateway=1, replicas=1)
    scenario.decide()
    assert scenario.condition("Ready").status == "False"
    assert scenario.condition("ReplicasReady").message == "0 of 1 replicas are ready"
    scenario.ray_service("RUNNING")
    scenario.pods(head=1, replicas=1)
    scenario.decide()
    assert scenario.condition("Ready").reason == "GatewayNotReady"
    scenario.pods(head=1, replicas=1, gateway=1)
    scenario.decide()
    assert scenario.condition("Ready").status == "True"
    assert scenario.condition("Reconciling").status == "False"
    assert (scenario.status.phase, scenario.status.replicas, scenario.status.ready_replicas) == ("Serving", "1/1", 1)
    assert scenario.status.url.startswith("http://")


def test_a_lost_replica_leaves_the_endpoint_ready() -> None:
    scenario = Scenario(a_service(replicas={"min": 2, "max": 2}))
    scenario.serves()
    scenario.pods(head=1, gateway=1, replicas=1)
    scenario.decide()
    assert scenario.condition("Ready").status == "True"
    assert scenario.condition("ReplicasReady").message == "1 of 2 replicas are ready"
    assert scenario.condition("Reconciling").status == "True"


def test_a_replica_is_ready_once_it_has_loaded_its_model() -> None:
    scenario = Scenario(a_service(replicas={"min": 3, "max": 3}))
    scenario.serves()
    scenario.pods(head=1, gateway=1, replicas=3, loading=3)
    scenario.decide()
    assert (scenario.status.replicas, scenario.status.ready_replicas) == ("0/3", 0)
    assert scenario.condition("Ready").reason == "WaitingForReplicas"
    scenario.pods(head=1, gateway=1, replicas=3, loading=2)
    scenario.decide()
    assert (scenario.status.replicas, scenario.condition("Ready").status) == ("1/3", "True")
    assert scenario.condition("ReplicasReady").message == "1 of 3 replicas are ready, 2 loading the model"
    assert scenario.condition("Reconciling").reason == "WaitingForReplicas"
    scenario.pods(head=1, gateway=1, replicas=3)
    scenario.decide()
    assert (scenario.status.replicas, scenario.condition("ReplicasReady").status) == ("3/3", "True")


def test_a_lost_pod_counts_before_ray_serve_notices_it() -> None:
    scenario = Scenario(a_service(replicas={"min": 2, "max": 2}))
    scenario.serves()
    scenario.pods(head=1, gateway=1, replicas=1, loading=-1)
    scenario.decide()
    assert (scenario.status.replicas, scenario.status.ready_replicas) == ("1/2", 1)


def test_number_of_ready_replicas_only_falls_while_it_is_unknown() -> None:
    scenario = Scenario(a_service(replicas={"min": 3, "max": 3}))
    scenario.serves()
    scenario.pods(head=1, gateway=1, replicas=3)
    scenario.decide()
    for count, ready in ((2, 2), (3, 2), (1, 1), (3, 1)):
        scenario.pods(head=1, gateway=1, replicas=count)
        scenario.observe(traffic=replace(scenario.observed.traffic, running_replicas=None))
        scenario.decide()
        assert (scenario.status.ready_replicas, scenario.condition("Ready").status) == (ready, "True")
    assert scenario.condition("ReplicasReady").message == "1 of 3 replicas are ready"


def test_a_new_service_is_not_ready_before_its_gateway_has_reported_a_replica() -> None:
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete")
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=1)
    scenario.observe(traffic=Traffic())
    scenario.decide()
    assert (scenario.condition("Ready").status, scenario.status.replicas) == ("False", "0/1")


def test_ready_pods_count_where_no_gateway_reports_replicas() -> None:
    """Gateways of an image from before the report, or ones that the operator cannot reach."""
    scenario = Scenario(a_service(replicas={"min": 2, "max": 2}))
    scenario.job(OUTPUT, 120, "Complete")
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=2)
    scenario.observe(traffic=Traffic(no_replica_report=True))
    scenario.decide()
    assert (scenario.condition("Ready").status, scenario.status.replicas) == ("True", "2/2")


def unused_pod_scenario(unplaced_seconds: float) -> Scenario:
    """A service with two ready pods, of which Ray uses the first; a second replica waits for a pod."""
    scenario = Scenario(a_service(replicas={"min": 2, "max": 2}))
    scenario.serves()
    scenario.pods(head=1, gateway=1, replicas=2, loading=1)
    ready = iter([("10.0.0.1", 900.0), ("10.0.0.2", 500.0)])
    pods = [
        replace(pod, address=address, ready_since=rfc3339(scenario.now - seconds))
        for pod in scenario.observed.pods
        for address, seconds in [next(ready) if pod.component == "replicas" else ("", 0.0)]
    ]
    stats = GatewayStats("a", {}, replica_addresses=frozenset({"10.0.0.1"}), unplaced_seconds=unplaced_seconds)
    scenario.observe(pods=pods, traffic=replace(scenario.observed.traffic, gateways=[stats]))
    return scenario


def test_a_pod_that_ray_does_not_use_is_replaced_while_a_replica_waits() -> None:
    scenario = unused_pod_scenario(UNPLACED_SECONDS)
    assert [pod.address for pod in scenario.decide().replace] == ["10.0.0.2"]
    message = "1 of 2 replicas are ready, Ray places none on a ready pod: the pod will be replaced"
    assert scenario.condition("ReplicasReady").message == message


def test_a_replica_gets_time_to_be_placed() -> None:
    scenario = unused_pod_scenario(UNPLACED_SECONDS - 1)
    assert not scenario.decide().replace
    assert scenario.condition("ReplicasReady").message == "1 of 2 replicas are ready, 1 loading the model"


def test_a_new_pod_gets_time_to_be_used() -> None:
    scenario = unused_pod_scenario(UNPLACED_SECONDS)
    just_ready = [replace(pod, ready_since=rfc3339(scenario.now - 5)) for pod in scenario.observed.pods]
    scenario.observe(pods=just_ready)
    decision = scenario.decide()
    assert not decision.replace
    assert decision.requeue_after is not None
    scenario.now += UNPLACED_SECONDS
    assert [pod.address for pod in scenario.decide().replace] == ["10.0.0.2"]


def test_no_pod_is_replaced_if_all_are_used() -> None:
    scenario = unused_pod_scenario(UNPLACED_SECONDS)
    stats = replace(scenario.observed.traffic.gateways[0], replica_addresses=frozenset({"10.0.0.1", "10.0.0.2"}))
    scenario.observe(traffic=replace(scenario.observed.traffic, gateways=[stats]))
    assert not scenario.decide().replace
