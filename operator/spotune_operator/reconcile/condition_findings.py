"""The findings of a reconcile: one for each condition but those that ``kstatus.py`` derives from them.

The message of a cause is in full in the most specific condition, to which others refer. The exception is a cause that
makes the job ``Stalled``: GitOps tools show that condition alone (see ``kstatus.py``).

``Training`` follows from this table. The first row whose condition holds decides:

=====================================================  =========================  ===================================
condition                                              status                     reason
=====================================================  =========================  ===================================
the job has ended, or its pods stop                    ``False``                  ``NotRunning``
no head pod runs; workers that trained still run       ``Unknown``                ``NoDriver``
no head pod runs                                       ``False``                  ``NoHead``
freshness ``UNREACHABLE``                              ``Unknown``                ``SupervisorUnreachable``
freshness ``NO_RESPONSE`` or ``REPEATED``              unchanged, or ``False``    unchanged, or ``Starting``
the job was resumed while its workers stopped          ``False``                  ``NotRunning``
freshness ``DRIVER_SILENT``, and commits fail          ``Unknown``                ``NotWritten``
freshness ``DRIVER_SILENT``                            ``False``                  ``Recovering``
freshness ``RANKS_SILENT``                             ``Unknown``                ``NoSignOfLife``
the next driver has not found workers that trained     ``Unknown``                ``NoDriver``
the workers train, evaluate or export                  ``True``                   the trainer's phase
otherwise                                              ``False``                  the trainer's phase
=====================================================  =========================  ===================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from spotune.custom_resource.pod_problems import PodProblem
from spotune.units.timestamps import unix_time
from spotune_operator.kube.conditions import Finding, find, reference
from spotune_operator.observe.supervisor_status import ACTIVE_PHASES, CheckResponse, Freshness
from spotune_operator.reconcile.desired_state import ClusterTarget, ReconcileContext
from spotune_operator.reconcile.limits.cost import cost_finding
from spotune_operator.reconcile.limits.deadline import deadline_finding
from spotune_operator.reconcile.pools.matching import message as pools_message
from spotune_operator.reconcile.pools.matching import unmatched

POOLS_MATCH: Final = "PoolsMatch"
"""Condition of jobs with pools: whether a node matches each. It stops nothing: an autoscaler may create the nodes."""
_ACTIVITIES = {
    "Training": "the model is being trained",
    "Evaluating": "the model is being evaluated",
    "Exporting": "the model is being exported",
}
"""Message of the condition ``Training`` in each of ``ACTIVE_PHASES``."""


def condition_findings(context: ReconcileContext, last_progress: str) -> list[Finding]:
    """One finding for each condition; none for a condition that cannot be known yet, which then stays unchanged.

    Args:
        context: The input of the reconcile.
        last_progress: RFC 3339 time of the last progress.
    """
    return [
        *_outcome(context),
        _suspended(context),
        _storage_ready(context),
        *_pools_match(context),
        _cluster_ready(context),
        _preflight_passed(context),
        _data_prepared(context),
        *_training(context),
        _not_progressing(context, last_progress),
        *_checkpoint_healthy(context),
        *_limits(context),
    ]


def failed_checks(context: ReconcileContext) -> list[CheckResponse]:
    """The checks of the preflight that failed; one that was skipped because of them is not among them."""
    return [check for check in context.progress.supervisor.preflight.checks if check.status == "failed"]


def _outcome(context: ReconcileContext) -> Iterator[Finding]:
    if context.outcome == "trained":
        yield _complete(context)
    else:
        yield Finding("Complete", "False", "NotYet")
    if context.outcome == "failed":
        earlier = find(context.previous.conditions, "Failed")
        recorded = earlier.message if earlier is not None and earlier.status == "True" else ""
        message = _progress_message(context) or recorded or "the trainer gave up without a reason: see spotune logs"
        yield Finding("Failed", "True", "JobError", message)
    else:
        yield Finding("Failed", "False", "NotFailed")


def _complete(context: ReconcileContext) -> Finding:
    """The finding of a trained model. What it says of the end of the run stays when the supervisor is gone."""
    early, problem = context.progress.stopped_early, context.progress.export_problem
    earlier = find(context.previous.conditions, "Complete")
    if not (early or problem) and earlier is not None and earlier.status == "True":
        return Finding("Complete", "True", earlier.reason, earlier.message)
    message = "; ".join(text for text in (early or "the model is trained and exported", problem) if text)
    return Finding("Complete", "True", "StoppedEarly" if early else "Trained", message)


def _suspended(context: ReconcileContext) -> Finding:
    if not context.must_pause or context.outcome is not None:
        return Finding("Suspended", "False", "NotSuspended")
    if context.observed.pods:
        return Finding("Suspended", "Unknown", "Suspending", "the workers commit, then all pods are deleted")
    resume = f"run `spotune resume {context.job.metadata.name}` or set suspend: false"
    remedy = resume if context.job.spec.suspend else "raise spec.maxCost"
    message = f"all pods are deleted; {remedy} to continue from the last commit"
    return Finding("Suspended", "True", "Suspended", message)


def _storage_ready(context: ReconcileContext) -> Finding:
    storage = context.job.spec.storage
    claim = context.observed.children.get("PersistentVolumeClaim")
    if message := context.observed.refused.get("PersistentVolumeClaim"):
        return Finding("StorageReady", "False", "Refused", message)
    if storage.bucket:
        if any(check.name == "bucket" for check in failed_checks(context)):
            return Finding("StorageReady", "False", "BucketUnusable", reference("PreflightPassed"))
        return Finding("StorageReady", "True", "Bucket", f"the job is kept in {storage.bucket}")
    if storage.existing_claim:
        return _existing_claim(storage.existing_claim, context)
    if claim is None:
        return Finding("StorageReady", "False", "Creating", "the claim is being created")
    if claim.phase == "Bound":
        message = f"{claim.capacity} of storage class {claim.storage_class or 'default'}"
        return Finding("StorageReady", "True", "Bound", message)
    if claim.phase == "Lost":
        message = f"the volume of claim {claim.name} is lost: restore it under the same claim"
        return Finding("StorageReady", "False", "Lost", message)
    message = "the volume is being created; some storage classes wait for the first pod"
    return Finding("StorageReady", "Unknown", "Pending", message)


def _existing_claim(name: str, context: ReconcileContext) -> Finding:
    if name in (context.observed.missing_claims or ()):
        missing = f"there is no PersistentVolumeClaim {name} in this namespace: create it, or correct the name"
        return Finding("StorageReady", "False", "ClaimNotFound", f"spec.storage.existingClaim: {missing}")
    return Finding("StorageReady", "True", "ExistingClaim", f"the job uses the claim {name}")


def _pools_match(context: ReconcileContext) -> Iterator[Finding]:
    """Whether every pool matches a node; none without pools, or before the nodes are known."""
    pools = context.job.spec.workers.pools
    if not pools or context.provider is None:
        return
    if found := unmatched(pools, context.observed.all_nodes, context.provider):
        yield Finding(POOLS_MATCH, "Unknown", "NoNodeYet", pools_message(found, context.provider))
    else:
        yield Finding(POOLS_MATCH, "True", "Matched", "a node matches each pool")


def _cluster_ready(context: ReconcileContext) -> Finding:
    observed, workers = context.observed, context.job.spec.workers
    if context.outcome is not None and "RayCluster" not in observed.children:
        return Finding("ClusterReady", "False", "Deleted", "the RayCluster was deleted after the end of the job")
    if context.is_paused:
        return Finding("ClusterReady", "False", "Freed", "the pods stop until the job continues")
    if context.target in (ClusterTarget.HEAD_ONLY, ClusterTarget.DELETE):
        return Finding("ClusterReady", "False", "Released", "the workers are deleted; the head follows")
    if context.waits_in_queue:
        queue = context.job.spec.cluster.queue_name
        return Finding("ClusterReady", "False", "Queued", f"the job waits for quota in queue {queue}")
    problem = observed.pod_problem
    if observed.head is None or not observed.head.ready:
        shown = problem or PodProblem("HeadPending", "the head pod is starting")
        return Finding("ClusterReady", "False", shown.reason, shown.message)
    if context.replicas.total == 0 and context.target is ClusterTarget.RUN:
        message = "workers are created after the preflight and the preparation of data"
        return Finding("ClusterReady", "False", "NoWorkersYet", message)
    running = sum(pod.runs for pod in observed.workers)
    count = f"{running} of {context.count} workers run"
    if context.count > workers.count:
        count = f"{count}, until the trainer knows that workers.count is {workers.count}"
    missing = max(context.count - running, 0) if context.outcome is None else 0
    waiting = f"{count}, waiting for {missing} more" if missing else count
    if running < workers.min_count:
        shown = problem or PodProblem("WorkersPending", waiting)
        return Finding("ClusterReady", "False", shown.reason, shown.message)
    if context.queue_request is not None and (held_back := sum(pod.held_back for pod in observed.workers)):
        queue = context.job.spec.cluster.queue_name
        return Finding("ClusterReady", "True", "Running", f"{count}; queue {queue} has no quota for {held_back} more")
    message = f"{count}; {problem.message}" if problem is not None and missing else waiting
    return Finding("ClusterReady", "True", "Running", message)


def _preflight_passed(context: ReconcileContext) -> Finding:
    if context.preflight_passed:
        return Finding("PreflightPassed", "True", "Passed", "the checks of storage, model and data passed")
    if failed := failed_checks(context):
        message = "; ".join(f"{check.name}: {check.message}" for check in failed)
        return Finding("PreflightPassed", "False", "CheckFailed", message)
    message = "the preflight checks storage, model and data on the head first"
    return Finding("PreflightPassed", "Unknown", "NotYet", message)


def _data_prepared(context: ReconcileContext) -> Finding:
    if context.data_prepared:
        if not context.prepares_data:
            return Finding("DataPrepared", "True", "NothingToPrepare")
        earlier = find(context.previous.conditions, "DataPrepared")
        recorded = earlier.message if earlier is not None and earlier.status == "True" else ""
        return Finding("DataPrepared", "True", "Prepared", context.progress.data_left_out or recorded)
    if not context.preflight_passed and context.progress.phase != "Preparing":
        return Finding("DataPrepared", "False", "Preparing", "the preparation of data waits for the preflight")
    message = context.progress.message or "the data is being prepared on the head"
    return Finding("DataPrepared", "False", "Preparing", message)


def _training(context: ReconcileContext) -> Iterator[Finding]:
    """The finding of the module's table; none while the progress is unknown and the condition exists already."""
    head = context.observed.head
    if context.outcome is not None or context.target is not ClusterTarget.RUN:
        yield Finding("Training", "False", "NotRunning")
    elif head is None or not head.runs:
        message = _cluster_ready(context).message
        if _may_train_on(context):
            yield Finding("Training", "Unknown", "NoDriver", f"{message}; the workers train on meanwhile if they can")
        else:
            yield Finding("Training", "False", "NoHead", message)
    elif context.freshness in (Freshness.NO_RESPONSE, Freshness.REPEATED):
        if find(context.previous.conditions, "Training") is None:
            yield Finding("Training", "False", "Starting", "the supervisor has not been polled yet")
    elif context.is_still_stopping:
        yield Finding("Training", "False", "NotRunning", "the workers stop, and then start again")
    else:
        yield _training_by_progress(context)


def _may_train_on(context: ReconcileContext) -> bool:
    """Whether workers run that trained, or were about to, when their driver was lost: they need none for that."""
    earlier = find(context.previous.conditions, "Training")
    trained = earlier is not None and (earlier.status == "True" or earlier.reason in ("NoDriver", "Loading"))
    return trained and any(pod.runs for pod in context.observed.workers)


def _training_by_progress(context: ReconcileContext) -> Finding:
    phase, problem = context.progress.phase or "Starting", context.progress.checkpoint_problem
    match context.freshness:
        case Freshness.UNREACHABLE:
            message = f"{context.poll.error}; training continues without the operator"
            return Finding("Training", "Unknown", "SupervisorUnreachable", message)
        case Freshness.DRIVER_SILENT if problem:
            return Finding("Training", "Unknown", "NotWritten", problem)
        case Freshness.DRIVER_SILENT:
            supervisor = context.progress.supervisor
            why = supervisor.message if supervisor.state == "waiting" else ""
            message = why or "the driver is silent; the supervisor starts another one"
            return Finding("Training", "False", "Recovering", message)
        case Freshness.RANKS_SILENT:
            return Finding("Training", "Unknown", "NoSignOfLife", "the workers send no heartbeat; one may be lost")
    if phase in ACTIVE_PHASES:
        message = context.progress.message if context.progress.adopting else ""
        return Finding("Training", "True", phase, message or _ACTIVITIES[phase])
    if (context.progress.adopting or phase == "Starting") and _may_train_on(context):
        return Finding("Training", "Unknown", "NoDriver", _idle_message(context))
    return Finding("Training", "False", phase, _idle_message(context))


def _idle_message(context: ReconcileContext) -> str:
    """The supervisor's message, which also holds the failed checks of the preflight: these belong elsewhere."""
    if failed_checks(context) and not context.preflight_passed:
        return "training waits for the preflight"
    return _progress_message(context) or _cluster_ready(context).message


def _progress_message(context: ReconcileContext) -> str:
    """The message of the supervisor, or else of the trainer; empty if there is none."""
    return context.progress.supervisor.message or context.progress.message


def _not_progressing(context: ReconcileContext, last_progress: str) -> Finding:
    since = unix_time(last_progress)
    timeout = context.job.spec.retry.hang_timeout
    if context.outcome is not None or context.must_pause:
        return Finding("NotProgressing", "False", "NotRunning")
    if since is None or context.now - since < timeout.seconds:
        return Finding("NotProgressing", "False", "Progressing")
    cluster, problem = _cluster_ready(context), context.observed.pod_problem
    if cluster.reason == "NoWorkersYet" and failed_checks(context):
        reason, cause = cluster.reason, reference("PreflightPassed")
    elif cluster.status == "False":
        reason, cause = cluster.reason, cluster.message
    elif context.is_unreachable:
        reason, cause = "SupervisorUnreachable", context.poll.error
    elif problem is not None:
        reason, cause = problem.reason, problem.message
    else:
        reason, cause = "NoNewStep", _progress_message(context) or "the trainer gives no reason"
    return Finding("NotProgressing", "True", reason, f"no progress since {last_progress}: {cause}")


def _checkpoint_healthy(context: ReconcileContext) -> Iterator[Finding]:
    newest, problem = context.progress.last_checkpoint, context.progress.checkpoint_problem
    if problem:
        since = f"no commit since step {newest.step}" if newest is not None else "no commit yet"
        yield Finding("CheckpointHealthy", "False", "CommitFails", f"{since}: {problem}")
    elif newest is not None:
        yield Finding("CheckpointHealthy", "True", "Committed", f"step {newest.step} is committed")
    elif context.previous.last_checkpoint is None:
        yield Finding("CheckpointHealthy", "Unknown", "NoneYet", "no checkpoint is committed yet")


def _limits(context: ReconcileContext) -> Iterator[Finding]:
    """Whether the deadline and the limit of cost hold, of a job that has them and has not ended."""
    if context.outcome is not None:
        return
    for finding in (
        deadline_finding(context.job, context.deadline),
        cost_finding(context.job, context.previous),
    ):
        if finding is not None:
            yield finding
