"""Decisions from a new job to a model: what is asked for when, and how it ends."""

from __future__ import annotations

import pytest

from tests.operator.support.scenarios import (
    NOW,
    SETTINGS,
    Life,
    a_cluster_job,
    a_life,
    a_training_life,
    cluster_of,
    replicas,
)

# From nothing to training


def test_new_job_gets_all_children_and_no_workers() -> None:
    decision = Life(a_cluster_job()).decide()
    kinds = [manifest["kind"] for manifest in decision.apply]
    assert kinds == ["PersistentVolumeClaim", "ConfigMap", "NetworkPolicy", "RayCluster"]
    assert replicas(decision) == {"workers": 0}
    assert cluster_of(decision)["suspend"] is False, "KubeRay ends a suspension only when it is told so"


def test_cluster_in_a_queue_is_suspended_by_kueue_alone() -> None:
    decision = Life(a_cluster_job(cluster={"queueName": "gpu"})).decide()
    assert "suspend" not in cluster_of(decision)


def test_workers_are_asked_for_when_preflight_has_passed() -> None:
    life = a_life()
    life.has_children()
    life.has_pods()
    life.supervisor_says("Starting", "preflight", passed=False)
    assert replicas(life.decide()) == {"workers": 0}
    assert (life.status.phase, life.condition("ClusterReady").reason) == ("Preflight", "NoWorkersYet")
    life.supervisor_says("Starting", passed=True)
    assert replicas(life.decide()) == {"workers": 2}
    assert life.is_true("PreflightPassed")


def test_failed_preflight_is_said_and_keeps_gpus_away() -> None:
    life = a_life()
    life.has_children()
    life.has_pods()
    checks = [{"name": "storage-space", "status": "failed", "message": "needs 40 GiB, 10 GiB are free"}]
    life.supervisor_says("Starting", "preflight", passed=False, checks=checks)
    assert replicas(life.decide()) == {"workers": 0}
    stalled = life.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "PreflightFailed")
    assert "needs 40 GiB" in stalled.message
    life.supervisor_says("Starting", passed=True)
    life.decide()
    assert not life.is_true("Stalled")


def test_data_is_prepared_before_workers_are_asked_for() -> None:
    life = a_life(dataset={"prepare": {"source": "s3://bucket/raw"}, "prompt": "{q}", "completion": "{a}"})
    life.has_children()
    life.has_pods()
    life.supervisor_says("Preparing", message="prepared 1,000 rows, 1 of 9 parts")
    assert replicas(life.decide()) == {"workers": 0}
    assert life.condition("DataPrepared").message == "prepared 1,000 rows, 1 of 9 parts"
    life.supervisor_says("WaitingForWorkers")
    assert replicas(life.decide()) == {"workers": 2}


def test_a_lost_head_does_not_take_the_workers_away() -> None:
    life = a_training_life()
    life.has_pods(head=False, workers=2)
    life.see(reading=None)
    assert replicas(life.decide()) == {"workers": 2}
    assert life.is_true("PreflightPassed")
    assert life.condition("Training").status == "False"


def test_training_job_is_ready_and_shows_its_figures() -> None:
    life = a_life()
    life.trains(step=30, etaSeconds=70.0, tokensPerSecond=1000.0, restarts={"workerLost": 2, "hang": 1}, goodput=0.9312)
    life.decide()
    status = life.status
    assert status.goodput == 0.9312
    assert (status.phase, status.step, status.total_steps, status.loss) == ("Training", 30, 100, 1.5)
    assert (status.workers, status.restarts.worker_lost, status.restarts.total) == ("2/2", 2, 3)
    assert status.eta == "2027-01-15T08:01:10Z"
    assert life.is_true("Ready")
    assert not life.is_true("Reconciling")
    assert not life.is_true("Stalled")


def test_checkpoint_is_healthy_once_there_is_one() -> None:
    life = a_training_life()
    assert life.condition("CheckpointHealthy").status == "Unknown"
    life.trains(step=60, lastCheckpoint={"step": 50, "time": NOW})
    life.decide()
    assert life.is_true("CheckpointHealthy")
    assert life.status.last_checkpoint is not None
    assert (life.status.last_checkpoint.step, life.status.last_checkpoint.time) == (50, "2027-01-15T08:00:00Z")


def test_the_same_moment_again_changes_nothing() -> None:
    life = a_training_life()
    first, second = life.decide(), life.decide()
    assert first.apply == second.apply
    assert first.status == second.status


# What an operator does not know


def test_restarted_operator_says_nothing_new_before_it_has_asked() -> None:
    life = a_training_life()
    before = life.status
    life.see(reading=None)
    life.has_pods(workers=2)
    life.decide()
    assert life.status.phase == before.phase == "Training"
    assert life.condition("Training").status == "True"


def test_silent_supervisor_is_unknown_and_nothing_is_restarted() -> None:
    life = a_training_life()
    life.is_silent(since=life.now)
    life.decide(after=10)
    assert life.condition("Training").status == "True", "a short silence means nothing"
    decision = life.decide(after=SETTINGS.unreachable_seconds)
    training = life.condition("Training")
    assert (training.status, training.reason) == ("Unknown", "SupervisorUnreachable")
    assert life.condition("Ready").status == "Unknown"
    assert (decision.delete, decision.force_delete, decision.ask) == ([], [], "")
    assert replicas(decision) == {"workers": 2}


def test_figures_of_a_silent_supervisor_stay_but_promise_no_end() -> None:
    life = a_training_life()
    life.trains(step=40, etaSeconds=60.0)
    life.decide()
    life.is_silent(since=life.now - SETTINGS.unreachable_seconds)
    life.decide()
    assert (life.status.step, life.status.eta) == (40, "")


@pytest.mark.parametrize("state", ["preflight", "waiting"])
def test_new_supervisor_that_repeats_what_was_said_last_changes_nothing(state: str) -> None:
    """After the loss of a head it does not make a job Ready, after its own it does not make it less."""
    life = a_training_life()
    life.trains(step=40, state=state, ageSeconds=8.0)
    life.decide()
    assert life.is_true("Training")
    life.has_pods(head=False, workers=2)
    life.decide()
    life.has_pods(workers=2)
    life.trains(step=40, state=state, ageSeconds=8.0)
    life.decide()
    assert not life.is_true("Training")
    assert not life.is_true("Ready")
    assert life.status.phase == "Starting"
    life.trains(step=41, ageSeconds=0.3)
    life.decide()
    assert life.is_true("Ready")


def test_words_of_a_driver_that_is_gone_are_not_taken_for_training() -> None:
    life = a_training_life()
    life.trains(step=40, ageSeconds=45.0, etaSeconds=60.0, tokensPerSecond=1000.0)
    life.decide()
    assert (life.status.phase, life.condition("Training").reason) == ("Recovering", "Recovering")
    assert not life.is_true("Ready")
    assert (life.status.step, life.status.eta, life.status.tokens_per_second) == (40, "", None)
    life.trains(step=41, ageSeconds=0.3)
    life.decide()
    assert life.is_true("Training")


def test_workers_that_give_no_sign_of_life_are_not_said_to_train() -> None:
    """A machine that is gone says nothing: its peers wait for it until Ray gives it up."""
    life = a_training_life()
    life.trains(step=40, silentSeconds=16.0)
    life.decide()
    assert (life.condition("Training").status, life.condition("Training").reason) == ("Unknown", "NoSignOfLife")
    assert not life.is_true("Ready")
    assert life.status.phase == "Training"
    life.trains(step=41, silentSeconds=0.4)
    life.decide()
    assert life.is_true("Ready")


def test_exporting_takes_its_time() -> None:
    life = a_training_life()
    life.trains(phase="Exporting", step=100, silentSeconds=90.0)
    life.decide()
    assert life.is_true("Training")


def test_commits_that_fail_are_said_while_training_goes_on() -> None:
    life = a_training_life()
    life.trains(step=40, lastCheckpoint={"step": 20, "time": NOW}, checkpointProblem="the volume is slow")
    life.decide()
    found = life.condition("CheckpointHealthy")
    assert (found.status, found.reason) == ("False", "CommitFails")
    assert found.message == "nothing since step 20 is saved: the volume is slow"
    assert life.is_true("Ready")
    life.trains(step=60, lastCheckpoint={"step": 60, "time": NOW})
    life.decide()
    assert life.is_true("CheckpointHealthy")


def test_full_volume_is_no_silent_driver() -> None:
    life = a_training_life()
    life.trains(step=40, ageSeconds=45.0, checkpointProblem="No space left on the volume")
    life.decide()
    assert (life.condition("Training").status, life.condition("Training").reason) == ("Unknown", "NotWritten")
    assert not life.is_true("Ready")


# Ends


def test_trained_job_gives_its_workers_back_at_once_and_the_head_later() -> None:
    life = a_training_life()
    life.supervisor_says("Done", "trained", step=100)
    assert replicas(life.decide()) == {"workers": 0}
    assert life.status.phase == "Complete"
    assert life.is_true("Complete")
    assert life.is_true("Ready")
    assert life.status.output.startswith("pvc://spotune-job/")
    decision = life.decide(after=301)
    assert [child.kind for child in decision.delete] == ["RayCluster"]
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}


def test_complete_stays_complete_when_the_cluster_is_gone() -> None:
    life = a_training_life()
    life.supervisor_says("Done", "trained", step=100)
    life.decide()
    life.see(children={}, pods=(), reading=None)
    decision = life.decide(after=1000)
    assert life.status.phase == "Complete"
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}
    assert decision.again_after is None


def test_kept_cluster_is_left_alone() -> None:
    life = a_life(cleanup={"cluster": "keep"})
    life.trains()
    life.supervisor_says("Done", "trained", step=100)
    decision = life.decide(after=10_000)
    assert decision.delete == []
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}


def test_longer_training_goes_on_after_the_end() -> None:
    life = a_training_life()
    life.supervisor_says("Done", "trained", step=100)
    life.decide()
    life.see(children={}, pods=(), reading=None)
    life.edit(a_cluster_job(training={"epochs": 4, "globalBatchSize": 96}))
    decision = life.decide(after=1000)
    assert cluster_of(decision)["workerGroupSpecs"][0]["replicas"] == 2
    assert life.status.phase == "Provisioning"
    assert not life.is_true("Complete")


def test_failed_job_says_why_and_stays_failed() -> None:
    life = a_training_life()
    life.supervisor_says("Failed", "failed", why="spec.dataset.prompt: no column 'question'")
    life.decide()
    assert life.status.phase == "Failed"
    assert life.condition("Failed").message == "spec.dataset.prompt: no column 'question'"
    assert life.condition("Stalled").reason == "Failed"
    life.see(children={}, pods=(), reading=None)
    life.decide(after=1000)
    assert life.condition("Failed").message == "spec.dataset.prompt: no column 'question'"


def test_failed_job_is_tried_again_when_its_spec_changes() -> None:
    life = a_training_life()
    life.supervisor_says("Failed", "failed", why="broken")
    life.decide()
    life.edit(a_cluster_job(retry={"appFailureLimit": 5}))
    life.decide()
    assert not life.is_true("Failed"), "the supervisor has not read the new file yet: what it says is about the old one"
    life.supervisor_says("Failed", "failed", why="broken again")
    life.decide()
    assert life.is_true("Failed")


def test_failed_job_whose_cluster_is_gone_starts_again_when_its_spec_changes() -> None:
    life = a_training_life()
    life.supervisor_says("Failed", "failed", why="broken")
    life.decide()
    life.see(children={}, pods=(), reading=None)
    life.edit(a_cluster_job(cleanup={"after": "1m"}))
    decision = life.decide()
    assert "RayCluster" in {manifest["kind"] for manifest in decision.apply}
    assert not life.is_true("Failed")
