"""What is true of a job now, one finding for each condition, in sentences that say what to do."""

from __future__ import annotations

from collections.abc import Iterator

from spotune_operator.errors import StalledError
from spotune_operator.kube.conditions import Finding, find
from spotune_operator.kube.timestamps import unix_time
from spotune_operator.observe.pod_problems import Trouble
from spotune_operator.reconcile.desired_state import STEPPING, Aim, Situation

_USERS_TO_MEND = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"),
        *("FailedCreateHeadPod", "FailedCreateWorkerPod"),  # but for a quota, which has a reason of its own
    }
)
"""Troubles of pods that time does not heal."""
_DOING = {
    "Training": "steps are made",
    "Evaluating": "the model is evaluated",
    "Exporting": "the model is exported",
}
"""What workers do, in words; the phases of ``STEPPING``."""


def findings(situation: Situation, last_progress: str) -> list[Finding]:
    """One finding for each condition; where it cannot be known yet, none, and the condition stays as it was.

    Args:
        situation: The job at this moment.
        last_progress: RFC 3339 time since which nothing new was done.
    """
    parts = [
        *_ends(situation),
        _suspended(situation),
        _storage(situation),
        _cluster(situation),
        *_beginnings(situation),
        *_training(situation),
        _not_progressing(situation, last_progress),
        *_checkpoint(situation),
    ]
    return [*_summary(situation, {part.type: part for part in parts}), *parts]


def stalled_findings(error: StalledError | Exception) -> list[Finding]:
    """The findings about a job that cannot be acted on, because something in its spec cannot be."""
    reason = error.reason if isinstance(error, StalledError) else "InvalidSpec"
    return [
        Finding("Ready", "False", reason, "see the condition Stalled"),
        Finding("Reconciling", "False", reason),
        Finding("Stalled", "True", reason, str(error)),
    ]


def phase(situation: Situation, findings_by_type: dict[str, Finding], before: str) -> str:
    """Where the job is, for people."""
    if situation.outcome is not None:
        return "Complete" if situation.outcome == "trained" else "Failed"
    if findings_by_type["Stalled"].status == "True":
        return "Stalled"
    if situation.job.spec.suspend:
        return "Suspended" if findings_by_type["Suspended"].status == "True" else "Suspending"
    if situation.stands_still:
        return "Restarting"
    head = situation.seen.head
    if head is None or not head.runs:
        return "Provisioning"
    return _phase_of_head(situation, before)


def _phase_of_head(situation: Situation, before: str) -> str:
    """What the supervisor says, or said last."""
    if not situation.is_told:
        return before if before not in ("", "Provisioning", "Restarting") else "Starting"
    if not situation.preflight_passed:
        return "Preflight"
    said = situation.reading.said.phase or "Starting"
    if said in STEPPING and situation.reading.said.is_old and not situation.unreachable:
        return "Recovering"
    return {"Done": "Exporting", "Failed": "Starting"}.get(said, said)


def _summary(situation: Situation, parts: dict[str, Finding]) -> Iterator[Finding]:
    """The conditions of kstatus, from all others."""
    stalled = _stalled(situation, parts)
    training = parts.get("Training")
    if situation.outcome == "trained":
        ready = Finding("Ready", "True", "Complete", "the model is trained")
    elif situation.outcome == "failed":
        ready = Finding("Ready", "False", "Failed", "see the condition Failed")
    elif stalled.status == "True":
        ready = Finding("Ready", "False", stalled.reason, "see the condition Stalled")
    elif parts["Suspended"].status != "False":
        ready = Finding("Ready", "False", parts["Suspended"].reason, parts["Suspended"].message)
    elif training is None:
        yield stalled
        return
    else:
        ready = Finding("Ready", training.status, training.reason, training.message)
    yield ready
    yield stalled
    settled = situation.outcome is not None or "True" in (ready.status, stalled.status, parts["Suspended"].status)
    yield Finding("Reconciling", "False" if settled else "True", ready.reason, "" if settled else ready.message)


def _stalled(situation: Situation, parts: dict[str, Finding]) -> Finding:
    """Whether only a person can help."""
    if situation.outcome == "failed":
        return Finding("Stalled", "True", "Failed", parts["Failed"].message)
    if situation.outcome is None:
        for kind, words in situation.seen.refused.items():
            return Finding("Stalled", "True", "Refused", f"the API server does not take the {kind}: {words}")
        trouble = _trouble(situation)
        if trouble is not None and trouble.reason in _USERS_TO_MEND:
            return Finding("Stalled", "True", trouble.reason, trouble.message)
        preflight = parts["PreflightPassed"]
        if preflight.status == "False" and preflight.reason == "CheckFailed":
            return Finding("Stalled", "True", "PreflightFailed", preflight.message)
    return Finding("Stalled", "False", "NothingToMend", "nothing waits for a person")


def _ends(situation: Situation) -> Iterator[Finding]:
    before = situation.previous.conditions
    if situation.outcome == "trained":
        yield Finding("Complete", "True", "Trained", "the model is trained and exported")
    else:
        yield Finding("Complete", "False", "NotYet")
    if situation.outcome == "failed":
        earlier = find(before, "Failed")
        kept = earlier.message if earlier is not None and earlier.status == "True" else ""
        words = _words(situation) or kept or "the job cannot be trained as it is"
        yield Finding("Failed", "True", "JobError", words)
    else:
        yield Finding("Failed", "False", "NotFailed")


def _suspended(situation: Situation) -> Finding:
    if not situation.job.spec.suspend or situation.outcome is not None:
        return Finding("Suspended", "False", "NotSuspended")
    if situation.seen.pods:
        return Finding("Suspended", "Unknown", "Suspending", "the workers commit, and all pods go")
    return Finding("Suspended", "True", "Suspended", "all pods are gone; suspend: false goes on from the last commit")


def _storage(situation: Situation) -> Finding:
    storage = situation.job.spec.storage
    claim = situation.seen.children.get("PersistentVolumeClaim")
    if words := situation.seen.refused.get("PersistentVolumeClaim"):
        return Finding("StorageReady", "False", "Refused", words)
    if storage.existing_claim:
        return Finding("StorageReady", "True", "ExistingClaim", f"{storage.existing_claim} is used as it is")
    if claim is None:
        return Finding("StorageReady", "False", "Creating", "the claim is being made")
    if claim.phase == "Bound":
        return Finding("StorageReady", "True", "Bound", f"{claim.capacity} of class {claim.storage_class or 'default'}")
    if claim.phase == "Lost":
        return Finding("StorageReady", "False", "Lost", f"the volume of claim {claim.name} is gone: restore it")
    return Finding("StorageReady", "Unknown", "Pending", "a volume is made when the first pod wants it, or soon")


def _cluster(situation: Situation) -> Finding:
    seen, workers = situation.seen, situation.job.spec.workers
    if situation.outcome is not None and "RayCluster" not in seen.children:
        return Finding("ClusterReady", "False", "Deleted", "given back after the end of the job")
    if situation.aim in (Aim.RELEASE, Aim.DELETE):
        return Finding("ClusterReady", "False", "Released", "the workers are given back; the head goes next")
    if situation.stands_still:
        return Finding("ClusterReady", "False", "Freed", "no pods are wanted now")
    trouble = _trouble(situation)
    if seen.head is None or not seen.head.ready:
        what = trouble or Trouble("HeadPending", "the head pod is being started")
        return Finding("ClusterReady", "False", what.reason, what.message)
    wanted, running = situation.replicas, sum(pod.runs for pod in seen.workers)
    if wanted.workers == 0 and situation.aim is Aim.RUN:
        return Finding("ClusterReady", "False", "NoWorkersYet", "workers are asked for when there is work for them")
    count = f"{running} of {workers.count} workers run"
    if running < workers.min:
        what = trouble or Trouble("WorkersPending", count)
        return Finding("ClusterReady", "False", what.reason, what.message)
    more = f"; {trouble.message}" if trouble is not None and running < workers.count else ""
    return Finding("ClusterReady", "True", "Running", f"{count}{more}")


def _trouble(situation: Situation) -> Trouble | None:
    """Why pods do not start: the head's first, then the workers', then those that cannot even be made."""
    seen = situation.seen
    pods = sorted(
        (pod for pod in seen.pods if pod.deleting_since is None), key=lambda pod: (pod.component != "head", pod.name)
    )
    found = [pod.trouble for pod in pods if pod.trouble is not None]
    cluster = seen.children.get("RayCluster")
    if cluster is not None and cluster.trouble is not None:
        found.append(cluster.trouble)
    return found[0] if found else None


def _beginnings(situation: Situation) -> Iterator[Finding]:
    """What has to be true before GPUs are asked for."""
    if situation.preflight_passed:
        yield Finding("PreflightPassed", "True", "Passed", "storage, model and data are as they have to be")
    else:
        yield _preflight(situation)
    if situation.data_prepared:
        reason = "Prepared" if situation.prepares_data else "NothingToPrepare"
        yield Finding("DataPrepared", "True", reason)
    else:
        words = situation.reading.said.message or "the data is prepared on the head first"
        yield Finding("DataPrepared", "False", "Preparing", words)


def _preflight(situation: Situation) -> Finding:
    failed = [check for check in situation.reading.said.supervisor.preflight.checks if check.status == "failed"]
    if failed:
        words = "; ".join(f"{check.name}: {check.message}" for check in failed)
        return Finding("PreflightPassed", "False", "CheckFailed", words)
    return Finding("PreflightPassed", "Unknown", "NotYet", "storage, model and data are looked at on the head first")


def _training(situation: Situation) -> Iterator[Finding]:
    """Nothing while the supervisor has not been asked yet."""
    reading = situation.reading
    if situation.outcome is not None or situation.aim is not Aim.RUN:
        yield Finding("Training", "False", "NotRunning")
        return
    head = situation.seen.head
    if head is None or not head.runs:
        yield Finding("Training", "False", "NoHead", _cluster(situation).message)
        return
    if situation.unreachable:
        yield Finding("Training", "Unknown", "SupervisorUnreachable", f"{reading.error}; training goes on without us")
        return
    if not situation.is_told:
        if find(situation.previous.conditions, "Training") is None:
            yield Finding("Training", "False", "Starting", "the supervisor has not been asked yet")
        return
    said = reading.said.phase or "Starting"
    if said in STEPPING and reading.said.is_old and reading.said.checkpoint_problem:
        yield Finding("Training", "Unknown", "NotWritten", reading.said.checkpoint_problem)
        return
    if said in STEPPING and reading.said.is_old:
        yield Finding("Training", "False", "Recovering", "the driver is silent; the supervisor starts another")
        return
    if reading.said.is_silent:
        yield Finding("Training", "Unknown", "NoSignOfLife", "the workers are silent; one of them may be lost")
        return
    if said in STEPPING:
        yield Finding("Training", "True", said, _DOING[said])
        return
    yield Finding("Training", "False", said, _words(situation) or _cluster(situation).message)


def _words(situation: Situation) -> str:
    """What the supervisor says in a sentence, or else the trainer; empty if neither does."""
    said = situation.reading.said
    return said.supervisor.message or said.message


def _not_progressing(situation: Situation, last_progress: str) -> Finding:
    since = unix_time(last_progress)
    timeout = situation.job.spec.retry.hang_timeout
    stands = situation.outcome is not None or situation.job.spec.suspend
    if since is None or stands or situation.now - since < timeout.seconds:
        return Finding("NotProgressing", "False", "Progressing" if not stands else "NotRunning")
    cluster, trouble = _cluster(situation), _trouble(situation)
    if cluster.status == "False":
        reason, why = cluster.reason, cluster.message
    elif situation.unreachable:
        reason, why = "SupervisorUnreachable", situation.reading.error
    elif trouble is not None:
        reason, why = trouble.reason, trouble.message
    else:
        reason, why = "NoNewStep", _words(situation) or "the trainer does not say why"
    return Finding("NotProgressing", "True", reason, f"nothing new since {last_progress}: {why}")


def _checkpoint(situation: Situation) -> Iterator[Finding]:
    newest, problem = situation.reading.said.last_checkpoint, situation.reading.said.checkpoint_problem
    if problem:
        since = f"nothing since step {newest.step} is saved" if newest is not None else "nothing is saved yet"
        yield Finding("CheckpointHealthy", "False", "CommitFails", f"{since}: {problem}")
    elif newest is not None:
        yield Finding("CheckpointHealthy", "True", "Committed", f"step {newest.step}")
    elif situation.previous.last_checkpoint is None:
        yield Finding("CheckpointHealthy", "Unknown", "NoneYet", "nothing is committed yet")
