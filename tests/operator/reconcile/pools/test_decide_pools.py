"""Decisions about a job with pools: groups of the RayCluster, memory in the status, conditions, and what is used."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from spotune.job import FinetuneJobStatus
from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.state import Pod
from spotune_operator.providers import AKS
from spotune_operator.reconcile.decide import Decision
from spotune_operator.reconcile.pinned import template_hashes
from tests.operator.support.scenarios import Scenario, a_cluster_job, cluster_of, new_scenario, replicas

SPOT = {"name": "spot-a", "capacity": "spot", "zone": "a", "price": "1.00 USD", "max": 2}
DEAR = {"name": "dear", "capacity": "on-demand", "price": "3.00 USD"}
CHEAP = {"name": "cheap", "capacity": "spot", "zone": "b", "price": "0.50 USD"}


def has_pods_in(scenario: Scenario, **pools: tuple[int, int]) -> None:
    """Set the pods: a running head, and running and waiting workers of each pool (with _ for -)."""
    assert scenario.status.pinned is not None
    hashes = template_hashes(scenario.status.pinned)
    known = {pod.name: pod for pod in scenario.observed.pods}
    namespace, job = scenario.job.metadata.namespace, scenario.job.metadata.name
    pods = [
        known.get("head")
        or Pod("head", namespace, "uid-h", job, "head", template=hashes["head"], phase="Running", ready=True, node="n0")
    ]
    for pool, (running, waiting) in pools.items():
        group = pool.replace("_", "-")
        for number in range(running + waiting):
            name, runs = f"{group}-{number}", number < running
            before = known.get(name)
            created = before.created if before is not None else scenario.now
            started = (before.started if before is not None else None) or scenario.now
            pods.append(
                Pod(
                    name, namespace, f"uid-{name}", job, "workers", group, hashes[group],
                    node=f"node-{group}" if runs else "", phase="Running" if runs else "Pending", ready=runs,
                    created=created, started=started if runs else None, gpus=1,
                )
            )  # fmt: skip
    scenario.observe(pods=tuple(pods))


def started(*pools: dict[str, Any], **workers: Any) -> Scenario:
    """A job with pools that has passed its preflight and has no worker yet."""
    scenario = new_scenario(workers={"count": 2, "min": 1, "pools": list(pools), **workers})
    scenario.has_children()
    has_pods_in(scenario)
    scenario.supervisor_reports()
    return scenario


def leaving(decision: Decision) -> dict[str, list[str]]:
    """The pods that KubeRay is to delete, by group."""
    groups = cluster_of(decision)["workerGroupSpecs"]
    return {each["groupName"]: each["scaleStrategy"]["workersToDelete"] for each in groups if "scaleStrategy" in each}


def test_no_workers_before_the_preflight_has_passed() -> None:
    scenario = new_scenario(workers={"count": 2, "pools": [SPOT, DEAR]})
    assert replicas(scenario.decide()) == {"spot-a": 0, "dear": 0}


def test_workers_of_pools_stay_until_the_trainer_knows_that_fewer_are_wanted() -> None:
    scenario = started(SPOT, DEAR)
    has_pods_in(scenario, spot_a=(2, 0))
    assert replicas(scenario.decide()) == {"spot-a": 2, "dear": 0}
    scenario.edit(a_cluster_job(workers={"count": 1, "min": 1, "pools": [SPOT, DEAR]}))
    assert replicas(scenario.decide()) == {"spot-a": 2, "dear": 0}
    scenario.supervisor_reports()
    assert replicas(scenario.decide()) == {"spot-a": 1, "dear": 0}


def test_the_cheapest_pool_comes_first_and_its_maximum_holds() -> None:
    scenario = started(DEAR, SPOT, CHEAP, count=3)
    assert replicas(scenario.decide()) == {"dear": 0, "spot-a": 0, "cheap": 3}
    assert [pool.name for pool in scenario.status.pools] == ["cheap", "spot-a", "dear"]
    without = started({**DEAR, "price": None}, SPOT, count=3)
    assert replicas(without.decide()) == {"dear": 3, "spot-a": 0}, "without all prices the list's order counts"


def test_a_refusal_moves_waiting_workers_by_name_and_survives_a_restart() -> None:
    scenario = started(SPOT, DEAR, poolPatience="5m")
    scenario.decide()
    has_pods_in(scenario, spot_a=(1, 1))
    decision = scenario.decide()
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 300.2
    decision = scenario.decide(after=301)
    assert replicas(decision) == {"spot-a": 1, "dear": 1}
    assert leaving(decision) == {"spot-a": ["spot-a-1"]}, "KubeRay would delete any of the two"
    scenario.status = FinetuneJobStatus.model_validate(json.loads(scenario.status.model_dump_json()))
    decision = scenario.decide(after=1)
    assert (replicas(decision), leaving(decision)) == ({"spot-a": 1, "dear": 1}, {"spot-a": ["spot-a-1"]})
    found = scenario.status.pools[0]
    assert (found.name, found.refusals, found.running, found.pending) == ("spot-a", 1, 1, 1)
    assert found.retry_at is not None
    has_pods_in(scenario, spot_a=(1, 0), dear=(1, 0))
    decision = scenario.decide(after=60)
    assert (replicas(decision), leaving(decision)) == ({"spot-a": 1, "dear": 1}, {})
    assert replicas(scenario.decide(after=300)) == {"spot-a": 2, "dear": 1}, "one probe"


def test_a_better_pool_takes_over_once_its_workers_are_ready() -> None:
    scenario = started(SPOT, DEAR)
    scenario.decide()
    has_pods_in(scenario, dear=(2, 0))
    assert replicas(scenario.decide()) == {"spot-a": 2, "dear": 2}
    has_pods_in(scenario, spot_a=(1, 1), dear=(2, 0))
    assert leaving(scenario.decide(after=60)) == {}
    has_pods_in(scenario, spot_a=(2, 0), dear=(2, 0))
    decision = scenario.decide(after=60)
    assert (replicas(decision), leaving(decision)) == ({"spot-a": 2, "dear": 0}, {"dear": ["dear-0", "dear-1"]})
    assert scenario.status.pools_moved_at is not None
    assert (replicas(scenario.decide(after=5)), leaving(scenario.decide())) == (replicas(decision), leaving(decision))


def test_fewer_workers_are_asked_for_within_the_cooldown() -> None:
    scenario = started(SPOT, DEAR)
    scenario.status = scenario.status.model_copy(update={"pools_moved_at": "2027-01-15T08:00:00Z"})
    has_pods_in(scenario, spot_a=(2, 0))
    assert replicas(scenario.decide()) == {"spot-a": 2, "dear": 0}
    spec = {"count": 1, "min": 1, "pools": [SPOT, DEAR]}
    scenario.edit(new_scenario(workers=spec).job)
    scenario.supervisor_reports()
    assert replicas(scenario.decide()) == {"spot-a": 1, "dear": 0}


def test_no_worker_moves_while_the_job_commits() -> None:
    scenario = started(SPOT, DEAR)
    scenario.decide()
    has_pods_in(scenario, dear=(2, 0), spot_a=(2, 0))
    pools = scenario.job.spec.workers.model_dump(by_alias=True, exclude_unset=True)
    scenario.edit(new_scenario(workers=pools, suspend=True).job)
    scenario.supervisor_reports(state="running")
    for after in (0, 3600):
        decision = scenario.decide(after=after)
        assert decision.command == "stop"
        assert (replicas(decision), leaving(decision)) == ({"spot-a": 2, "dear": 2}, {}), "a move would end the commit"
    has_pods_in(scenario, dear=(1, 0), spot_a=(0, 2))
    decision = scenario.decide(after=3600)
    assert replicas(decision) == {"spot-a": 2, "dear": 1}
    assert {pool.refusals for pool in scenario.status.pools} == {0}, "the wait is not the pool's fault"


@pytest.mark.parametrize("change", [{"price": "9.00 USD"}, {"max": 1}, {"after": "1m"}])
def test_price_maximum_and_patience_restart_no_pod(change: dict[str, Any]) -> None:
    scenario = started(SPOT, DEAR)
    before = scenario.decide().status.pinned
    scenario.edit(new_scenario(workers={"count": 2, "min": 1, "pools": [{**SPOT, **change}, DEAR]}).job)
    assert scenario.decide().status.pinned == before


def test_a_new_pool_restarts_no_pod_of_the_others() -> None:
    scenario = started(SPOT, DEAR)
    has_pods_in(scenario, spot_a=(2, 0))
    scenario.decide()
    scenario.edit(new_scenario(workers={"count": 2, "min": 1, "pools": [SPOT, DEAR, CHEAP]}).job)
    scenario.supervisor_reports()
    decision = scenario.decide()
    assert decision.command == ""
    assert replicas(decision) == {"spot-a": 2, "dear": 0, "cheap": 2}


def test_a_pool_that_no_node_matches_is_named_before_there_are_pods() -> None:
    scenario = new_scenario(
        cluster={"provider": "aks"},
        workers={"count": 2, "pools": [SPOT, {"name": "typo", "gpuType": "NVIDIA-A1000"}]},
    )
    spot = {label.key: label.value for label in AKS.spot_labels}
    node = NodeView("n", labels={**spot, "topology.kubernetes.io/zone": "a"})
    scenario.observe(all_nodes=(node,))
    scenario.decide()
    found = scenario.condition("PoolsMatch")
    assert (found.status, found.reason) == ("Unknown", "NoNodeYet")
    assert "typo (spot, nvidia.com/gpu.product=NVIDIA-A1000)" in found.message
    assert "spot-a" not in found.message
    typed = NodeView("m", labels={**spot, "nvidia.com/gpu.product": "NVIDIA-A1000"})
    scenario.observe(all_nodes=(node, typed))
    scenario.decide()
    assert scenario.is_true("PoolsMatch")
    on_demand = replace(node, labels={"topology.kubernetes.io/zone": "a"})
    scenario.observe(all_nodes=(on_demand, typed))
    scenario.decide()
    assert scenario.condition("PoolsMatch").status == "Unknown", "the node is not a spot node"


def test_a_job_without_pools_has_nothing_of_them() -> None:
    scenario = new_scenario()
    scenario.trains()
    decision = scenario.decide(after=100)
    assert replicas(decision) == {"workers": 2}
    assert "PoolsMatch" not in [each.type for each in scenario.status.conditions]
    assert scenario.status.pools == []


# Money


def test_money_is_counted_by_pool_and_saved_against_on_demand() -> None:
    scenario = started(SPOT, DEAR)
    scenario.decide()
    has_pods_in(scenario, spot_a=(1, 0), dear=(1, 0))
    scenario.decide()
    scenario.decide(after=3600)
    found = scenario.status.cost
    assert found is not None
    assert [found.spent, found.saved] == pytest.approx([4.0, 2.0])
    assert found.currency == "USD"
    assert (found.source, found.unknown) == ("price of workers.pools", "")
    assert {pool.name: pool.node_seconds for pool in scenario.status.pools} == {"spot-a": 3600, "dear": 3600}
    assert (scenario.status.gpu_seconds.spot, scenario.status.gpu_seconds.on_demand) == (3600, 3600)
    scenario.edit(new_scenario(workers={"count": 2, "min": 1, "pools": [{**SPOT, "price": "9.00 USD"}, DEAR]}).job)
    scenario.decide()
    assert scenario.status.cost == found, "a new price counts from now on"


def test_prices_of_the_values_are_chosen_by_labels_of_nodes() -> None:
    scenario = new_scenario()
    listed = [
        {"labels": {"type": "a100"}, "price": "2 EUR", "onDemandPrice": "5 EUR", "source": "list", "date": "2026-11-01"}
    ]
    scenario.settings = replace(scenario.settings, prices=json.dumps(listed))
    scenario.trains()
    scenario.observe(nodes={"n2": NodeView("n2", labels={"type": "a100"})})
    scenario.decide(after=1800)
    found = scenario.status.cost
    assert found is not None
    assert [found.spent, found.saved] == pytest.approx([2.0, 3.0])
    assert (found.currency, found.source, found.date) == ("EUR", "list", "2026-11-01")


def test_cost_without_a_price_says_what_is_missing() -> None:
    scenario = new_scenario()
    scenario.trains()
    scenario.observe(nodes={"n2": NodeView("n2")})
    scenario.decide(after=1800)
    found = scenario.status.cost
    assert found is not None
    assert (found.spent, found.unpriced_node_seconds) == (None, 3600)
    assert "no price for node n2: set price in workers.pools" in found.unknown
