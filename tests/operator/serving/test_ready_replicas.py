"""A service is ready once replicas have loaded their model: what Ray Serve reports, as far as it is known."""

from __future__ import annotations

from dataclasses import replace

from spotune_operator.serving.gateway_stats import Traffic
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
