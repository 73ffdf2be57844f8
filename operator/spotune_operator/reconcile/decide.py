"""The decision of one reconcile: which children to apply and delete, and the new status. Pure: no I/O, no clock.

A decision describes the whole desired state, not a difference. So it may be executed late, in part, or twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spotune.job import FinetuneJobStatus, TrainedStatus
from spotune.units.timestamps import unix_time
from spotune_operator.children.resolved_job import ResolvedJob
from spotune_operator.errors import StorageClassError
from spotune_operator.kube.conditions import updated
from spotune_operator.kueue.partial_admission import next_change
from spotune_operator.observe.existing_claims import SECOND_LOOKUP_SECONDS
from spotune_operator.observe.job_services import JobService
from spotune_operator.observe.nodes import pods_on_reclaimed_nodes, stuck_pods
from spotune_operator.observe.state import Child, Observed, Pod
from spotune_operator.observe.unfit_nodes import excluded, nodes_fit_findings, pods_to_replace, without_nodes
from spotune_operator.providers import refuse_unfit_class
from spotune_operator.reconcile.condition_findings import POOLS_MATCH, condition_findings
from spotune_operator.reconcile.desired_children import DesiredChildren
from spotune_operator.reconcile.desired_state import ClusterTarget, ReconcileContext, next_overdue
from spotune_operator.reconcile.job_serving import SERVED, served_finding, service_to_apply, services_to_delete
from spotune_operator.reconcile.kstatus import kstatus_findings, stalled_findings
from spotune_operator.reconcile.limits.cost import COST
from spotune_operator.reconcile.limits.deadline import DEADLINE, DECISION_SECONDS, refuse_past_deadline
from spotune_operator.reconcile.phase import phase
from spotune_operator.reconcile.pinned import pinned_cluster
from spotune_operator.reconcile.pools.usage import Usage, counts, used
from spotune_operator.reconcile.status_fields import queue_status, training_fields
from spotune_operator.settings import Settings

Manifest = dict[str, Any]
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_TERMINATING_PODS_SECONDS = 5.0
_STORAGE_FIELD = "spec.storage.storageClassName"


@dataclass(frozen=True)
class Decision:
    """The desired state of a job.

    Attributes:
        apply: Manifests of the desired children, in order.
        delete: Children to delete.
        delete_services: ModelServices to delete.
        delete_gracefully: Workers to delete gracefully, so that they commit before the cloud reclaims their node.
        force_delete: Pods to delete without a grace period, because no kubelet will confirm their end.
        expired: Whether the job itself is deleted, by ``ttlSecondsAfterFinished``.
        command: Command for the supervisor: ``stop`` (commit first) or ``start``; empty: none.
        status: The new status.
        requeue_after: Seconds until the next reconcile without an event; None: none is needed.
    """

    apply: Sequence[Manifest]
    delete: Sequence[Child]
    delete_services: Sequence[JobService]
    delete_gracefully: Sequence[Pod]
    force_delete: Sequence[Pod]
    expired: bool
    command: Literal["stop", "start", ""]
    status: FinetuneJobStatus
    requeue_after: float | None


def decide(
    desired: DesiredChildren,
    *,
    generation: int,
    previous: FinetuneJobStatus,
    observed: Observed,
    now: float,
    settings: Settings,
) -> Decision:
    """The decision about a valid job.

    Args:
        desired: The job and its children.
        generation: ``metadata.generation`` of the job.
        previous: The status of the last reconcile.
        observed: The state of the cluster.
        now: Unix time.
        settings: The operator's.

    Raises:
        StalledError: The spec cannot be applied in this cluster; ``decide_stalled`` makes the decision for it.
    """
    refuse_past_deadline(desired.job, observed.created)
    _refuse_missing_class(desired.resolved, observed)
    context = ReconcileContext(
        job=desired.job,
        generation=generation,
        job_file=desired.job_file,
        templates=desired.templates,
        templates_changed=previous.pinned is not None and previous.pinned != desired.pinned,
        previous=previous,
        observed=observed,
        now=now,
        settings=settings,
        provider=desired.resolved.provider,
    )
    target, status = context.target, _status(context, desired.resolved)
    cluster = observed.children.get("RayCluster")
    manifests = [_claim(desired, observed), *desired.others]
    is_deleted = target is ClusterTarget.DELETE or context.needs_new_cluster
    if target is not ClusterTarget.KEEP and not is_deleted:
        suspend = target is ClusterTarget.SUSPEND
        cluster_manifest = pinned_cluster(desired.resolved, desired.pinned, context.replicas, suspend=suspend)
        manifests.append(without_nodes(cluster_manifest, _excluded_nodes(context, status)))
    manifests.append(service_to_apply(desired.service, context))
    return Decision(
        apply=[manifest for manifest in manifests if manifest is not None],
        delete=[cluster] if is_deleted and cluster is not None and not cluster.deleting else [],
        delete_services=services_to_delete(context),
        delete_gracefully=_workers_to_notify(context),
        force_delete=stuck_pods(observed.pods, observed.nodes, now),
        expired=context.expires_at is not None and now >= context.expires_at,
        command=_command(context),
        status=status.model_copy(update={"pinned": desired.pinned}),
        requeue_after=_requeue_after(context),
    )


def decide_stalled(
    error: Exception,
    *,
    generation: int,
    previous: FinetuneJobStatus,
    observed: Observed,
    now: float,
    settings: Settings,
) -> Decision:
    """The decision about a job whose spec cannot be applied: its pods are left alone, except those of lost nodes.

    Args:
        error: Why it cannot be applied.
        generation: ``metadata.generation`` of the job.
        previous: The status of the last reconcile.
        observed: The state of the cluster.
        now: Unix time.
        settings: The operator's.
    """
    return Decision(
        apply=[],
        delete=[],
        delete_services=[],
        delete_gracefully=_workers_on_reclaimed_nodes(observed, settings),
        force_delete=stuck_pods(observed.pods, observed.nodes, now),
        expired=False,
        command="",
        status=stalled(previous, error, generation, now),
        # No event tells that what was wrong is over if it is, for example, the nodes of a second cloud.
        requeue_after=_TERMINATING_PODS_SECONDS if _has_terminating_pods(observed) else settings.rejected_retry_seconds,
    )


def stalled(previous: FinetuneJobStatus, error: Exception, generation: int, now: float) -> FinetuneJobStatus:
    """The status of a job whose spec cannot be applied."""
    conditions = updated(previous.conditions, stalled_findings(error), generation, now)
    changes = {"observed_generation": generation, "phase": "Stalled", "conditions": conditions}
    return previous.model_copy(update=changes)


def _excluded_nodes(context: ReconcileContext, status: FinetuneJobStatus) -> list[str]:
    """Names of the nodes that new worker pods avoid. In a queue, Kueue would suspend a job whose templates change."""
    return [] if context.job.spec.cluster.queue_name else excluded(status.unfit_nodes, context.observed.nodes)


def _workers_to_notify(context: ReconcileContext) -> Sequence[Pod]:
    """Workers on unfit nodes, and running ones on nodes that the cloud reclaims: others have nothing to commit."""
    observed = context.observed
    unfit = pods_to_replace(observed.workers, _excluded_nodes(context, context.previous), context.progress)
    reclaimed = _workers_on_reclaimed_nodes(observed, context.settings)
    return [*unfit, *(pod for pod in reclaimed if pod not in unfit)]


def _workers_on_reclaimed_nodes(observed: Observed, settings: Settings) -> Sequence[Pod]:
    if not settings.heed_preemption:
        return []
    return pods_on_reclaimed_nodes([pod for pod in observed.workers if pod.runs], observed.nodes)


def _status(context: ReconcileContext, resolved: ResolvedJob) -> FinetuneJobStatus:
    fields = training_fields(context)
    findings = {finding.type: finding for finding in condition_findings(context, fields["last_progress_time"])}
    unfit = fields.get("unfit_nodes", context.previous.unfit_nodes)
    findings |= {finding.type: finding for finding in nodes_fit_findings(unfit, context.previous.conditions)}
    findings |= {finding.type: finding for finding in kstatus_findings(context, findings)}
    served = served_finding(context)
    if served is not None:
        findings[SERVED] = served
    optional = {SERVED, POOLS_MATCH, DEADLINE, COST} - findings.keys()
    before = [each for each in context.previous.conditions if each.type not in optional]
    workers = context.job.spec.workers
    usage = Usage(workers, context.previous, context.observed, context.settings, context.now)
    running = sum(pod.runs for pod in context.observed.workers)
    trained = context.outcome == "trained"
    changes = {
        **fields,
        "observed_generation": context.generation,
        "phase": phase(context, findings, context.previous.phase),
        "workers": f"{min(running, context.count)}/{context.count}",
        **used(usage, context.pool_choice),
        "queue": queue_status(context),
        "deadline": context.measured,
        "trained": _trained(context) if trained else None,
        "ray_cluster": resolved.name if "RayCluster" in context.observed.children else "",
        "output": resolved.output if trained else "",
        "conditions": updated(before, findings.values(), context.generation, context.now),
    }
    return context.previous.model_copy(update=changes)


def _trained(context: ReconcileContext) -> TrainedStatus:
    """The length of the finished training; the step of the export stays when the supervisor is gone."""
    training, previous = context.job.spec.training, context.previous.trained
    step = context.progress.export_step or (previous.step if previous is not None else None)
    return TrainedStatus(epochs=training.epochs, max_steps=training.max_steps, step=step)


def _claim(desired: DesiredChildren, observed: Observed) -> Manifest | None:
    """The claim to apply; an existing claim keeps its class unless the spec names one.

    The class of a claim is immutable. Another version of the operator may have another default class, and leaving out a
    class that the operator applied before would remove it.
    """
    claim, existing = desired.claim, observed.children.get("PersistentVolumeClaim")
    if claim is None or existing is None or desired.job.spec.storage.storage_class_name:
        return claim
    spec = {name: part for name, part in claim["spec"].items() if name != "storageClassName"}
    if existing.storage_class:
        spec["storageClassName"] = existing.storage_class
    return claim | {"spec": spec}


def _refuse_missing_class(resolved: ResolvedJob, observed: Observed) -> None:
    """Refuse a storage class that does not exist or is unfit, before a claim waits for it forever.

    Raises:
        StorageClassError: The class is missing or unfit.
    """
    known = observed.storage_classes
    if known is None or resolved.bucket:
        return
    if resolved.job.spec.storage.existing_claim or "PersistentVolumeClaim" in observed.children:
        return
    name = resolved.storage_class
    default = [each for each, found in known.items() if _is_default(found)]
    available = f"available classes: {', '.join(sorted(known)) or 'none'}"
    if name and name not in known:
        raise StorageClassError(_STORAGE_FIELD, f"{name} does not exist in this cluster; {available}")
    if not name and not default:
        raise StorageClassError(_STORAGE_FIELD, f"is empty, and the cluster has no default class; {available}")
    refuse_unfit_class(known[name or default[0]])


def _is_default(storage_class: Any) -> bool:
    annotations = storage_class["metadata"].get("annotations") or {}
    return bool(annotations.get(_DEFAULT_CLASS) == "true")


def _command(context: ReconcileContext) -> Literal["stop", "start", ""]:
    if context.target is ClusterTarget.COMMIT:
        return "stop"
    if context.target is ClusterTarget.RUN and context.is_stopping:
        return "start"
    return ""


def _workers_may_change_in(context: ReconcileContext) -> Iterator[float | None]:
    """Seconds until the desired number of workers may change, by each of the rules for it."""
    workers, now = context.observed.workers, context.now
    yield next_overdue(context.job, workers, now)
    if context.queue_request is not None:
        yield next_change(context.queue_request, workers, now)
    if context.pool_choice is not None and context.pool_choice.next_change is not None:
        yield context.pool_choice.next_change - now
    if context.deadline is not None:
        yield DECISION_SECONDS


def _has_terminating_pods(observed: Observed) -> bool:
    return any(pod.deleting_since is not None for pod in observed.pods)


def _requeue_after(context: ReconcileContext) -> float | None:
    """Seconds until the decision changes by the passage of time alone; None if it does not."""
    now, settings, observed = context.now, context.settings, context.observed
    waits = [*_workers_may_change_in(context)]
    if context.expires_at is not None:
        waits.append(context.expires_at - now)
    if context.outcome is not None and context.target is not ClusterTarget.KEEP and "RayCluster" in observed.children:
        waits.append(context.cleanup_at - now)
    if _has_terminating_pods(observed):
        waits.append(_TERMINATING_PODS_SECONDS)
    if context.is_outdated:
        waits.append(settings.poll_seconds)
    if context.poll.failing_since is not None:
        waits.append(context.poll.failing_since + settings.unreachable_seconds - now)
    if any(counts(context.job.spec.workers, pod) for pod in observed.pods):
        waits.append(settings.poll_seconds)
    if observed.refused:
        waits.append(settings.rejected_retry_seconds)
    if context.outcome is None and (observed.missing_claims is None or observed.missing_claims):
        is_new = now - observed.created < SECOND_LOOKUP_SECONDS
        waits.append(SECOND_LOOKUP_SECONDS if is_new else settings.rejected_retry_seconds)
    last_progress = unix_time(context.previous.last_progress_time)
    if last_progress is not None and context.outcome is None and not context.must_pause:
        waits.append(last_progress + context.job.spec.retry.hang_timeout.seconds - now)
    return min((max(wait, 0.0) + 0.1 for wait in waits if wait is not None and wait > -1.0), default=None)
