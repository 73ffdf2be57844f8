"""The desired state of the RayCluster: every row of the module's table, and the precedence of the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune_operator.reconcile.desired_children import render
from spotune_operator.reconcile.desired_state import ClusterTarget, ReconcileContext
from tests.operator.support.scenarios import SETTINGS, Scenario, a_cluster_job, training_scenario

QUEUE = {"provider": "none", "queueName": "team"}
KEEP = {"cluster": "keep"}


def target(scenario: Scenario) -> ClusterTarget:
    """The target of the next reconcile."""
    previous = scenario.status
    desired = render(scenario.job, "uid-1", previous.pinned, scenario.observed.provider_ids, scenario.settings)
    context = ReconcileContext(
        job=scenario.job,
        generation=scenario.generation,
        job_file=desired.job_file,
        templates=desired.templates,
        templates_changed=previous.pinned != desired.pinned,
        previous=previous,
        observed=scenario.observed,
        now=scenario.now,
        settings=scenario.settings,
    )
    return context.target


def ended(after: float = 0.0, **sections: Any) -> Scenario:
    """A trained job, some seconds after its end."""
    scenario = training_scenario(**sections)
    scenario.supervisor_reports("Done", "trained", step=100)
    scenario.decide()
    scenario.now += after
    return scenario


def suspended(state: str = "running", **sections: Any) -> Scenario:
    """A job with `suspend: true` whose pods still run, and a supervisor in this state."""
    scenario = training_scenario(**sections)
    scenario.edit(a_cluster_job(suspend=True, **sections))
    scenario.supervisor_reports("Training", state)
    return scenario


def test_row_1_keeps_the_cluster_also_after_cleanup() -> None:
    assert target(ended(cleanup=KEEP)) is ClusterTarget.KEEP
    assert target(ended(after=100_000, cleanup=KEEP)) is ClusterTarget.KEEP


def test_row_2_deletes_the_cluster_after_cleanup() -> None:
    assert target(ended(after=301)) is ClusterTarget.DELETE


def test_row_3_leaves_the_head_of_an_ended_job() -> None:
    assert target(ended(after=299)) is ClusterTarget.HEAD_ONLY


def test_rows_1_to_3_precede_a_suspension() -> None:
    scenario = ended(after=301)
    scenario.edit(a_cluster_job(suspend=True))
    assert target(scenario) is ClusterTarget.DELETE


def test_row_4_runs_the_job() -> None:
    assert target(training_scenario()) is ClusterTarget.RUN
    assert target(Scenario(a_cluster_job())) is ClusterTarget.RUN


@pytest.mark.parametrize("sections", [{}, {"cluster": QUEUE}], ids=["alone", "in a queue"])
def test_row_5_waits_for_a_commit(sections: dict[str, Any]) -> None:
    assert target(suspended(**sections)) is ClusterTarget.COMMIT


def test_row_5_waits_for_a_commit_before_pods_are_replaced() -> None:
    scenario = training_scenario()
    pods = [replace(pod, template="another") for pod in scenario.observed.pods]
    scenario.observe(pods=tuple(pods))
    assert target(scenario) is ClusterTarget.COMMIT


@pytest.mark.parametrize("state", ["stopped", "failed", "trained"])
def test_rows_6_and_7_follow_when_the_supervisor_has_stopped(state: str) -> None:
    in_queue, alone = suspended(cluster=QUEUE), suspended()
    for scenario in (in_queue, alone):
        supervisor = {"state": state, "job": "of another job file"}
        assert scenario.observed.poll is not None
        progress = scenario.observed.poll.progress
        changed = progress.model_copy(update={"supervisor": progress.supervisor.model_copy(update=supervisor)})
        scenario.observe(poll=replace(scenario.observed.poll, response=changed))
    assert target(in_queue) is ClusterTarget.DELETE
    assert target(alone) is ClusterTarget.SUSPEND


def test_row_7_suspends_without_a_reachable_supervisor() -> None:
    scenario = suspended()
    scenario.polls_fail(since=scenario.now - SETTINGS.unreachable_seconds)
    assert target(scenario) is ClusterTarget.SUSPEND
    without_head = suspended()
    without_head.has_pods(head=False, workers=2)
    assert target(without_head) is ClusterTarget.SUSPEND


def test_row_7_completes_a_suspension_that_is_under_way() -> None:
    scenario = training_scenario()
    scenario.has_children(suspended=True)
    assert target(scenario) is ClusterTarget.SUSPEND
    scenario.observe(pods=())
    assert target(scenario) is ClusterTarget.RUN
