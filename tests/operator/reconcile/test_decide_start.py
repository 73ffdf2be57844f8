"""Decisions from a new job to a trained model."""

from __future__ import annotations

import pytest

from spotune.job import BestStatus, TrainedStatus
from tests.operator.support.scenarios import (
    NOW,
    SETTINGS,
    Scenario,
    a_cluster_job,
    cluster_of,
    new_scenario,
    replicas,
    training_scenario,
)

# From nothing to training


def test_new_job_gets_all_children_and_no_workers() -> None:
    decision = Scenario(a_cluster_job()).decide()
    kinds = [manifest["kind"] for manifest in decision.apply]
    assert kinds == ["PersistentVolumeClaim", "ConfigMap", "NetworkPolicy", "RayCluster"]
    assert replicas(decision) == {"workers": 0}
    assert cluster_of(decision)["suspend"] is False, "KubeRay ends a suspension only if the field is false"


def test_cluster_in_a_queue_is_suspended_by_kueue_alone() -> None:
    decision = Scenario(a_cluster_job(cluster={"queueName": "gpu"})).decide()
    assert "suspend" not in cluster_of(decision)


def test_workers_are_created_when_the_preflight_has_passed() -> None:
    scenario = new_scenario()
    scenario.has_children()
    scenario.has_pods()
    scenario.supervisor_reports("Starting", "preflight", passed=False)
    assert replicas(scenario.decide()) == {"workers": 0}
    assert (scenario.status.phase, scenario.condition("ClusterReady").reason) == ("Preflight", "NoWorkersYet")
    scenario.supervisor_reports("Starting", passed=True)
    assert replicas(scenario.decide()) == {"workers": 2}
    assert scenario.is_true("PreflightPassed")


def test_failed_preflight_stalls_the_job_and_requests_no_workers() -> None:
    scenario = new_scenario()
    scenario.has_children()
    scenario.has_pods()
    checks = [{"name": "storage-space", "status": "failed", "message": "needs 40 GiB, 10 GiB are free"}]
    scenario.supervisor_reports("Starting", "preflight", passed=False, checks=checks)
    assert replicas(scenario.decide()) == {"workers": 0}
    stalled = scenario.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "PreflightFailed")
    assert stalled.message == "preflight check storage-space failed; see condition PreflightPassed"
    assert scenario.condition("PreflightPassed").message == "storage-space: needs 40 GiB, 10 GiB are free"
    scenario.supervisor_reports("Starting", passed=True)
    scenario.decide()
    assert not scenario.is_true("Stalled")


def test_cause_of_a_failed_preflight_is_in_one_condition_without_its_follow_ups() -> None:
    scenario = new_scenario()
    scenario.has_children()
    scenario.has_pods()
    cause = "hf://team/t5 does not exist on the Hub: correct spec.model.source"
    checks = [
        {"name": "model", "status": "failed", "message": cause},
        {"name": "data", "status": "skipped", "message": "needs the tokenizer of the model"},
        {"name": "storage", "status": "passed", "message": ""},
    ]
    why = f"preflight failed: {cause}"
    scenario.supervisor_reports("Starting", "preflight", passed=False, checks=checks, why=why)
    messages: dict[str, str] = {}
    for seconds in (0.0, 10_000.0):
        scenario.decide(after=seconds)
        messages = {condition.type: condition.message for condition in scenario.status.conditions}
        assert [name for name, message in messages.items() if cause in message] == ["PreflightPassed"]
        assert "tokenizer" not in " ".join(messages.values()), "a skipped check is no cause"
        assert messages["Stalled"] == "preflight check model failed; see condition PreflightPassed"
        assert messages["Training"] == "training waits for the preflight"
    assert scenario.is_true("NotProgressing")
    assert messages["NotProgressing"].endswith("see condition PreflightPassed")


def test_several_failed_checks_are_named_together() -> None:
    scenario = new_scenario()
    scenario.has_children()
    scenario.has_pods()
    checks = [{"name": name, "status": "failed", "message": "is missing"} for name in ("model", "data")]
    scenario.supervisor_reports("Starting", "preflight", passed=False, checks=checks)
    scenario.decide()
    assert scenario.condition("Stalled").message == "preflight checks model, data failed; see condition PreflightPassed"


def test_data_is_prepared_before_workers_are_created() -> None:
    scenario = new_scenario(dataset={"prepare": {"source": "s3://bucket/raw"}, "prompt": "{q}", "completion": "{a}"})
    scenario.has_children()
    scenario.has_pods()
    scenario.supervisor_reports("Preparing", message="prepared 1,000 rows, 1 of 9 parts")
    assert replicas(scenario.decide()) == {"workers": 0}
    assert scenario.condition("DataPrepared").message == "prepared 1,000 rows, 1 of 9 parts"
    scenario.supervisor_reports("WaitingForWorkers", dataLeftOut="3 rows left out")
    assert replicas(scenario.decide()) == {"workers": 2}
    assert scenario.condition("DataPrepared").message == "3 rows left out"
    scenario.supervisor_reports("Training")
    scenario.decide()
    assert scenario.condition("DataPrepared").message == "3 rows left out", "also while no driver reports it"


def test_loss_of_the_head_keeps_the_workers() -> None:
    scenario = training_scenario()
    scenario.has_pods(head=False, workers=2)
    scenario.observe(poll=None)
    assert replicas(scenario.decide()) == {"workers": 2}
    assert scenario.is_true("PreflightPassed")
    assert scenario.condition("Training").status == "Unknown", "they train on if they can"


def test_training_job_is_ready_and_shows_its_metrics() -> None:
    scenario = new_scenario()
    scenario.trains(
        step=30, etaSeconds=70.0, tokensPerSecond=1000.0, restarts={"workerLost": 2, "hang": 1}, goodput=0.9312
    )
    scenario.decide()
    status = scenario.status
    assert status.goodput == 0.9312
    assert (status.phase, status.step, status.total_steps, status.loss) == ("Training", 30, 100, 1.5)
    assert (status.workers, status.restarts.worker_lost, status.restarts.total) == ("2/2", 2, 3)
    assert status.eta == "2027-01-15T08:01:10Z"
    assert scenario.is_true("Ready")
    assert not scenario.is_true("Reconciling")
    assert not scenario.is_true("Stalled")


def test_checkpoint_is_healthy_once_there_is_one() -> None:
    scenario = training_scenario()
    assert scenario.condition("CheckpointHealthy").status == "Unknown"
    scenario.trains(step=60, lastCheckpoint={"step": 50, "time": NOW})
    scenario.decide()
    assert scenario.is_true("CheckpointHealthy")
    assert scenario.status.last_checkpoint is not None
    assert (scenario.status.last_checkpoint.step, scenario.status.last_checkpoint.time) == (50, "2027-01-15T08:00:00Z")


def test_repeated_decision_changes_nothing() -> None:
    scenario = training_scenario()
    first, second = scenario.decide(), scenario.decide()
    assert first.apply == second.apply
    assert first.status == second.status


# Unknown and stale progress


def test_restarted_operator_keeps_the_status_until_the_first_poll() -> None:
    scenario = training_scenario()
    before = scenario.status
    scenario.observe(poll=None)
    scenario.has_pods(workers=2)
    scenario.decide()
    assert scenario.status.phase == before.phase == "Training"
    assert scenario.condition("Training").status == "True"


def test_silent_supervisor_is_unknown_and_nothing_is_restarted() -> None:
    scenario = training_scenario()
    scenario.polls_fail(since=scenario.now)
    scenario.decide(after=10)
    assert scenario.condition("Training").status == "True", "a short outage changes nothing"
    decision = scenario.decide(after=SETTINGS.unreachable_seconds)
    training = scenario.condition("Training")
    assert (training.status, training.reason) == ("Unknown", "SupervisorUnreachable")
    assert scenario.condition("Ready").status == "Unknown"
    assert (decision.delete, decision.force_delete, decision.command) == ([], [], "")
    assert replicas(decision) == {"workers": 2}


def test_metrics_of_an_unreachable_supervisor_stay_without_an_eta() -> None:
    scenario = training_scenario()
    scenario.trains(step=40, etaSeconds=60.0)
    scenario.decide()
    scenario.polls_fail(since=scenario.now - SETTINGS.unreachable_seconds)
    scenario.decide()
    assert (scenario.status.step, scenario.status.eta) == (40, "")


@pytest.mark.parametrize("state", ["preflight", "waiting"])
def test_progress_repeated_by_a_new_supervisor_changes_nothing(state: str) -> None:
    """After the loss of a head the job does not become Ready; after a restart of the supervisor it stays Ready."""
    scenario = training_scenario()
    scenario.trains(step=40, state=state, ageSeconds=8.0)
    scenario.decide()
    assert scenario.is_true("Training")
    scenario.has_pods(head=False, workers=2)
    scenario.decide()
    scenario.has_pods(workers=2)
    scenario.trains(step=40, state=state, ageSeconds=8.0)
    scenario.decide()
    assert not scenario.is_true("Training")
    assert not scenario.is_true("Ready")
    assert scenario.status.phase == "Starting"
    scenario.trains(step=41, ageSeconds=0.3)
    scenario.decide()
    assert scenario.is_true("Ready")


def test_stale_progress_does_not_count_as_training() -> None:
    scenario = training_scenario()
    scenario.trains(step=40, ageSeconds=45.0, etaSeconds=60.0, tokensPerSecond=1000.0)
    scenario.decide()
    assert (scenario.status.phase, scenario.condition("Training").reason) == ("Recovering", "Recovering")
    assert not scenario.is_true("Ready")
    assert (scenario.status.step, scenario.status.eta, scenario.status.tokens_per_second) == (40, "", None)
    scenario.trains(step=41, ageSeconds=0.3)
    scenario.decide()
    assert scenario.is_true("Training")


def test_workers_without_heartbeat_do_not_count_as_training() -> None:
    """A lost machine sends no heartbeat, and its peers wait for it until Ray gives it up."""
    scenario = training_scenario()
    scenario.trains(step=40, silentSeconds=16.0)
    scenario.decide()
    assert (scenario.condition("Training").status, scenario.condition("Training").reason) == ("Unknown", "NoSignOfLife")
    assert not scenario.is_true("Ready")
    assert scenario.status.phase == "Training"
    scenario.trains(step=41, silentSeconds=0.4)
    scenario.decide()
    assert scenario.is_true("Ready")


def test_workers_that_go_back_to_the_beginning_show_no_loss() -> None:
    scenario = training_scenario()
    scenario.trains(step=9, loss=2.5, epoch=0.5)
    scenario.decide()
    assert (scenario.status.step, scenario.status.loss) == (9, 2.5)
    scenario.trains(phase="Loading", step=0, loss=None, epoch=None)
    scenario.decide()
    assert (scenario.status.step, scenario.status.loss, scenario.status.epoch) == (0, None, None)


def test_export_needs_no_heartbeat() -> None:
    scenario = training_scenario()
    scenario.trains(phase="Exporting", step=100, silentSeconds=90.0)
    scenario.decide()
    assert scenario.is_true("Training")


def test_failed_commits_are_reported_while_training_continues() -> None:
    scenario = training_scenario()
    scenario.trains(step=40, lastCheckpoint={"step": 20, "time": NOW}, checkpointProblem="the volume is slow")
    scenario.decide()
    found = scenario.condition("CheckpointHealthy")
    assert (found.status, found.reason) == ("False", "CommitFails")
    assert found.message == "no commit since step 20: the volume is slow"
    assert scenario.is_true("Ready")
    scenario.trains(step=60, lastCheckpoint={"step": 60, "time": NOW})
    scenario.decide()
    assert scenario.is_true("CheckpointHealthy")


def test_full_volume_is_distinguished_from_a_silent_driver() -> None:
    scenario = training_scenario()
    scenario.trains(step=40, ageSeconds=45.0, checkpointProblem="No space left on the volume")
    scenario.decide()
    assert (scenario.condition("Training").status, scenario.condition("Training").reason) == ("Unknown", "NotWritten")
    assert not scenario.is_true("Ready")


# The end of a job


def test_trained_job_deletes_workers_at_once_and_the_head_later() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Done", "trained", step=100)
    assert replicas(scenario.decide()) == {"workers": 0}
    assert scenario.status.phase == "Complete"
    assert scenario.is_true("Complete")
    assert scenario.is_true("Ready")
    assert scenario.status.output.startswith("pvc://spotune-job/")
    decision = scenario.decide(after=301)
    assert [child.kind for child in decision.delete] == ["RayCluster"]
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}


def test_complete_stays_complete_when_the_cluster_is_gone() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Done", "trained", step=100)
    scenario.decide()
    scenario.observe(children={}, pods=(), poll=None)
    decision = scenario.decide(after=1000)
    assert scenario.status.phase == "Complete"
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}
    assert decision.requeue_after is None


def test_complete_says_why_training_stopped_early_also_when_the_cluster_is_gone() -> None:
    reason = "stopped early after step 120: loss has not improved in 3 evaluations; best 0.41 after step 90"
    best = {"step": 90, "metric": "loss", "value": 0.4100001}
    scenario = training_scenario()
    scenario.supervisor_reports("Done", "trained", step=120, stoppedEarly=reason, best=best, exportStep=90)
    scenario.decide()
    scenario.observe(children={}, pods=(), poll=None)
    scenario.decide(after=1000)
    assert scenario.is_true("Complete")
    assert (scenario.condition("Complete").reason, scenario.condition("Complete").message) == ("StoppedEarly", reason)
    assert scenario.status.best == BestStatus(step=90, metric="loss", value=0.41)
    assert (scenario.status.step, scenario.status.trained) == (120, TrainedStatus(epochs=3, step=90))
    scenario.edit(a_cluster_job(training={"epochs": 4, "globalBatchSize": 96}))
    scenario.decide(after=1000)
    assert not scenario.is_true("Complete"), "a longer run continues"
    scenario.trains(step=200, stoppedEarly=None, best=None)
    scenario.supervisor_reports("Done", "trained", step=240)
    scenario.decide()
    assert scenario.condition("Complete").message == "the model is trained and exported"


def test_complete_says_that_another_than_the_best_model_was_exported() -> None:
    problem = "the checkpoint of step 90 is damaged: rank-00000.safetensors is missing; the next best is exported"
    scenario = training_scenario()
    scenario.supervisor_reports("Done", "trained", step=120, exportProblem=problem)
    scenario.decide()
    assert scenario.condition("Complete").message == f"the model is trained and exported; {problem}"


def test_kept_cluster_is_left_alone() -> None:
    scenario = new_scenario(cleanup={"cluster": "keep"})
    scenario.trains()
    scenario.supervisor_reports("Done", "trained", step=100)
    decision = scenario.decide(after=10_000)
    assert decision.delete == []
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}


def test_longer_training_continues_after_the_end() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Done", "trained", step=100)
    scenario.decide()
    scenario.observe(children={}, pods=(), poll=None)
    scenario.edit(a_cluster_job(training={"epochs": 4, "globalBatchSize": 96}))
    decision = scenario.decide(after=1000)
    assert cluster_of(decision)["workerGroupSpecs"][0]["replicas"] == 2
    assert scenario.status.phase == "Provisioning"
    assert not scenario.is_true("Complete")


def test_failed_job_keeps_its_cause() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Failed", "failed", why="spec.dataset.prompt: no column 'question'")
    scenario.decide()
    assert scenario.status.phase == "Failed"
    assert scenario.condition("Failed").message == "spec.dataset.prompt: no column 'question'"
    assert scenario.condition("Stalled").reason == "Failed"
    scenario.observe(children={}, pods=(), poll=None)
    scenario.decide(after=1000)
    assert scenario.condition("Failed").message == "spec.dataset.prompt: no column 'question'"


def test_failed_job_is_retried_when_its_spec_changes() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Failed", "failed", why="broken")
    scenario.decide()
    scenario.edit(a_cluster_job(retry={"appFailureLimit": 5}))
    scenario.decide()
    assert not scenario.is_true("Failed"), (
        "the supervisor has not read the new file yet: what it says is about the old one"
    )
    scenario.supervisor_reports("Failed", "failed", why="broken again")
    scenario.decide()
    assert scenario.is_true("Failed")


def test_failed_job_whose_cluster_is_gone_starts_again_when_its_spec_changes() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Failed", "failed", why="broken")
    scenario.decide()
    scenario.observe(children={}, pods=(), poll=None)
    scenario.edit(a_cluster_job(cleanup={"after": "1m"}))
    decision = scenario.decide()
    assert "RayCluster" in {manifest["kind"] for manifest in decision.apply}
    assert not scenario.is_true("Failed")
