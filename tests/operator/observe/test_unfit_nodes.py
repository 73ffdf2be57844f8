"""Unfit nodes: new worker pods avoid them, pods that no rank uses leave them, and people are told."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.supervisor_status import PollResult
from spotune_operator.reconcile.decide import Decision
from spotune_operator.reconcile.events import job_events
from spotune_operator.reconcile.pinned import template_hashes
from tests.operator.reconcile.test_events import JOB
from tests.operator.support.scenarios import Scenario, cluster_of, training_scenario

ECC = {"node": "n2", "reason": "GPU 0 (H100): 2 uncorrected ECC errors", "since": 1.8e9, "boot": "b1", "inUse": False}
NODES = {"n1": NodeView("n1"), "n2": NodeView("n2", boot="b1"), "n3": NodeView("n3")}


def with_unfit_node(scenario: Scenario, **changes: Any) -> Decision:
    scenario.observe(nodes=NODES)
    scenario.trains(unfitNodes=[ECC | changes])
    return scenario.decide()


def affinities(decision: Decision) -> list[Any]:
    """The required node affinity of each worker group."""
    of_groups = [group["template"]["spec"].get("affinity", {}) for group in cluster_of(decision)["workerGroupSpecs"]]
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    return [each.get("nodeAffinity", {}).get(key, {}).get("nodeSelectorTerms") for each in of_groups]


AVOIDS_N2 = {"key": "metadata.name", "operator": "NotIn", "values": ["n2"]}


def test_new_pods_avoid_the_node_and_the_pod_there_is_replaced() -> None:
    scenario = training_scenario()
    before = scenario.status
    hashes = template_hashes(before.pinned)  # type: ignore[arg-type]
    first = with_unfit_node(scenario)
    assert affinities(first) == [[{"matchFields": [AVOIDS_N2]}]]
    assert list(first.delete_gracefully) == [], "its replacement might come to the same node"
    assert [(each.node, each.since) for each in scenario.status.unfit_nodes] == [("n2", "2027-01-15T08:00:00Z")]
    assert scenario.condition("NodesFit").message == f"left out until they are booted again: n2: {ECC['reason']}"
    (event,) = job_events(JOB, before, scenario.status, 1.8e9)
    assert (event["type"], event["reason"]) == ("Warning", "UnfitNode")
    assert event["message"] == f"node n2 is left out: {ECC['reason']}"

    second = scenario.decide()
    assert {pod.node for pod in second.delete_gracefully} == {"n2"}
    assert template_hashes(scenario.status.pinned) == hashes, "running pods must not count as outdated"  # type: ignore[arg-type]
    assert cluster_of(second)["suspend"] is False


def test_each_alternative_of_the_provider_excludes_the_node() -> None:
    scenario = training_scenario(
        cluster={"provider": "gke"}, workers={"count": 2, "min": 1, "capacity": "spot-then-on-demand"}
    )
    decision = with_unfit_node(scenario)
    assert len(affinities(decision)) == 2
    for terms in affinities(decision):
        for term in terms:
            assert AVOIDS_N2 in term["matchFields"]
    assert any("matchExpressions" in term for terms in affinities(decision) for term in terms), "spot labels remain"


def test_pod_whose_rank_still_commits_is_left_alone() -> None:
    scenario = training_scenario()
    with_unfit_node(scenario, inUse=True)
    assert list(scenario.decide().delete_gracefully) == []


@pytest.mark.parametrize("poll", [None, PollResult()], ids=["no head", "operator has just started"])
def test_pod_stays_while_nobody_knows_whether_ranks_run_there(poll: PollResult | None) -> None:
    """Workers may have outlived their head, and train or commit."""
    scenario = training_scenario()
    with_unfit_node(scenario, inUse=True)
    known = scenario.observed.poll
    scenario.observe(poll=poll)
    assert list(scenario.decide().delete_gracefully) == []
    assert [each.node for each in scenario.status.unfit_nodes] == ["n2"]
    scenario.observe(poll=known)
    assert list(scenario.decide().delete_gracefully) == []
    with_unfit_node(scenario)
    assert {pod.node for pod in scenario.decide().delete_gracefully} == {"n2"}


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(NODES | {"n2": NodeView("n2", boot="b2")}, id="booted again"),
        pytest.param({"n1": NodeView("n1")}, id="gone"),
    ],
)
def test_node_that_was_booted_again_may_be_used(nodes: dict[str, NodeView]) -> None:
    scenario = training_scenario()
    with_unfit_node(scenario)
    scenario.observe(nodes=nodes)
    decision = scenario.decide()
    assert affinities(decision) == [None]
    assert list(decision.delete_gracefully) == []


def test_templates_of_a_job_in_a_queue_do_not_change() -> None:
    scenario = training_scenario(cluster={"provider": "none", "queueName": "gpus"})
    assert affinities(with_unfit_node(scenario)) == [None]
    assert list(scenario.decide().delete_gracefully) == []
    assert scenario.condition("NodesFit").status == "False"


def test_nodes_stay_excluded_while_no_supervisor_answers_and_until_the_trainer_takes_them_back() -> None:
    scenario = training_scenario()
    with_unfit_node(scenario)
    scenario.observe(poll=None)
    assert affinities(scenario.decide()) == [[{"matchFields": [AVOIDS_N2]}]]
    scenario.trains(unfitNodes=[])
    scenario.decide()
    assert scenario.status.unfit_nodes == []
    assert scenario.is_true("NodesFit")


def test_stragglers_are_in_the_status_and_have_an_event_each() -> None:
    scenario = training_scenario()
    before = scenario.status
    slow = {"rank": 3, "node": "n2", "ratio": 1.4567, "since": 1.8e9}
    scenario.trains(stragglers=[slow])
    scenario.decide()
    (found,) = scenario.status.stragglers
    assert (found.rank, found.node, found.ratio, found.since) == (3, "n2", 1.46, "2027-01-15T08:00:00Z")
    (event,) = job_events(JOB, before, scenario.status, 1.8e9)
    assert (event["type"], event["reason"]) == ("Warning", "Straggler")
    takes = "takes 1.46 times as long as the median rank since 2027-01-15T08:00:00Z"
    assert event["message"] == f"rank 3 on node n2 {takes}"
    scenario.trains()
    scenario.decide()
    assert scenario.status.stragglers == []
