"""What to do about a job, and what to say about it: pure, from what is known at one moment. No I/O, no clock.

The decision is the whole of what is wanted, not the difference to what is there: it may be carried out at any time, in
part, or twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spotune.job import FinetuneJobStatus, TrainedStatus
from spotune_operator.children.resolved_job import DATA, PlacedJob
from spotune_operator.errors import StorageClassError
from spotune_operator.kube.conditions import updated
from spotune_operator.kube.timestamps import unix_time
from spotune_operator.observe.nodes import leaving_pods, stuck_pods
from spotune_operator.observe.state import Child, Observed, Pod
from spotune_operator.providers import refuse_unfit_class
from spotune_operator.reconcile.condition_findings import findings, phase, stalled_findings
from spotune_operator.reconcile.desired_children import Rendered
from spotune_operator.reconcile.desired_state import Aim, Situation, next_overdue
from spotune_operator.reconcile.pinned import pinned_cluster
from spotune_operator.reconcile.status_fields import gpu_seconds, training_figures
from spotune_operator.settings import Settings

Manifest = dict[str, Any]
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_LOOK_AT_GOING_PODS_SECONDS = 5.0
_STORAGE_FIELD = "spec.storage.storageClassName"


@dataclass(frozen=True)
class Decision:
    """What is wanted.

    Attributes:
        apply: Children as they are to be, in order.
        delete: Children that are not to be.
        give_notice: Workers that are asked to go, so that they commit before their machine is taken away.
        force_delete: Pods of which no node will ever say that they are gone.
        ask: What the supervisor is told: to commit and stop, or to go on.
        status: What is said about the job.
        again_after: Seconds until something is due even if nothing happens; None: nothing is.
    """

    apply: Sequence[Manifest]
    delete: Sequence[Child]
    give_notice: Sequence[Pod]
    force_delete: Sequence[Pod]
    ask: Literal["stop", "start", ""]
    status: FinetuneJobStatus
    again_after: float | None


def decide(
    rendered: Rendered,
    *,
    generation: int,
    previous: FinetuneJobStatus,
    seen: Observed,
    now: float,
    settings: Settings,
) -> Decision:
    """The decision about a valid job.

    Args:
        rendered: The job, and what it is made into.
        generation: ``metadata.generation`` of it.
        previous: The status so far.
        seen: What is known of its surroundings.
        now: Unix time.
        settings: The operator's.

    Raises:
        StalledError: The job asks for what cannot be; nothing is to be done, and ``stalled`` says what to say.
    """
    _refuse_missing_class(rendered.placed, seen)
    situation = Situation(
        job=rendered.job,
        generation=generation,
        job_file=rendered.job_file,
        templates=rendered.templates,
        renewed=previous.pinned is not None and previous.pinned != rendered.pinned,
        previous=previous,
        seen=seen,
        now=now,
        settings=settings,
    )
    aim = situation.aim
    cluster = seen.children.get("RayCluster")
    manifests = [_claim(rendered, seen), *rendered.others]
    if aim not in (Aim.DELETE, Aim.LEAVE):
        suspend = aim is Aim.FREE
        manifests.append(pinned_cluster(rendered.placed, rendered.pinned, situation.replicas, suspend=suspend))
    return Decision(
        apply=[manifest for manifest in manifests if manifest is not None],
        delete=[cluster] if aim is Aim.DELETE and cluster is not None and not cluster.deleting else [],
        give_notice=_to_be_told(seen) if settings.heed_preemption else [],
        force_delete=stuck_pods(seen.pods, seen.nodes, now),
        ask=_ask(situation),
        status=_status(situation, rendered.placed).model_copy(update={"pinned": rendered.pinned}),
        again_after=_again_after(situation),
    )


def stalled(previous: FinetuneJobStatus, error: Exception, generation: int, now: float) -> FinetuneJobStatus:
    """What is said about a job that cannot be acted on; what runs of it is left alone."""
    conditions = updated(previous.conditions, stalled_findings(error), generation, now)
    changes = {"observed_generation": generation, "phase": "Stalled", "conditions": conditions}
    return previous.model_copy(update=changes)


def _to_be_told(seen: Observed) -> Sequence[Pod]:
    """Workers whose machine is about to go; one that does not run yet has nothing to commit."""
    return leaving_pods([pod for pod in seen.workers if pod.runs], seen.nodes)


def _status(situation: Situation, placed: PlacedJob) -> FinetuneJobStatus:
    figures = training_figures(situation)
    found = findings(situation, figures["last_progress_time"])
    workers = situation.job.spec.workers
    running = sum(pod.runs for pod in situation.seen.workers)
    trained = situation.outcome == "trained"
    training = situation.job.spec.training
    changes = {
        **figures,
        "observed_generation": situation.generation,
        "phase": phase(situation, {item.type: item for item in found}, situation.previous.phase),
        "workers": f"{min(running, workers.count)}/{workers.count}",
        "gpu_seconds": gpu_seconds(situation),
        "trained": TrainedStatus(epochs=training.epochs, max_steps=training.max_steps) if trained else None,
        "ray_cluster": placed.name if "RayCluster" in situation.seen.children else "",
        "output": f"pvc://{placed.claim}/{placed.directory.relative_to(DATA)}/export" if trained else "",
        "conditions": updated(situation.previous.conditions, found, situation.generation, situation.now),
    }
    return situation.previous.model_copy(update=changes)


def _claim(rendered: Rendered, seen: Observed) -> Manifest | None:
    """The claim; one that is there keeps a class that nobody asked for.

    A claim's class cannot be changed, whatever another version of the operator takes for the provider's usual one, nor
    be left out where it was ours: that would take it away.
    """
    claim, there = rendered.claim, seen.children.get("PersistentVolumeClaim")
    if claim is None or there is None or rendered.job.spec.storage.storage_class_name:
        return claim
    spec = {name: part for name, part in claim["spec"].items() if name != "storageClassName"}
    if there.storage_class:
        spec["storageClassName"] = there.storage_class
    return claim | {"spec": spec}


def _refuse_missing_class(placed: PlacedJob, seen: Observed) -> None:
    """Refuse a class that does not exist, or does not do, before a claim waits for it for ever."""
    known = seen.storage_classes
    if known is None or placed.job.spec.storage.existing_claim or "PersistentVolumeClaim" in seen.children:
        return
    name = placed.storage_class
    default = [each for each, found in known.items() if _is_default(found)]
    there = f"there is {', '.join(sorted(known)) or 'none'}"
    if name and name not in known:
        raise StorageClassError(_STORAGE_FIELD, f"{name} does not exist in this cluster; {there}")
    if not name and not default:
        raise StorageClassError(_STORAGE_FIELD, f"is empty, and the cluster has no default class; {there}")
    refuse_unfit_class(known[name or default[0]])


def _is_default(storage_class: Any) -> bool:
    annotations = storage_class["metadata"].get("annotations") or {}
    return bool(annotations.get(_DEFAULT_CLASS) == "true")


def _ask(situation: Situation) -> Literal["stop", "start", ""]:
    state = situation.reading.said.supervisor.state
    if situation.aim is Aim.COMMIT:
        return "stop"
    if situation.aim is Aim.RUN and state in ("stopping", "stopped"):
        return "start"
    return ""


def _again_after(situation: Situation) -> float | None:
    """Seconds to the next moment at which time alone changes the decision."""
    now, settings, seen = situation.now, situation.settings, situation.seen
    moments = [next_overdue(situation.job, seen.workers, now)]
    if situation.outcome is not None and situation.aim is not Aim.LEAVE and "RayCluster" in seen.children:
        moments.append(situation.cleanup_at - now)
    if any(pod.deleting_since is not None for pod in seen.pods):
        moments.append(_LOOK_AT_GOING_PODS_SECONDS)
    if situation.reading.failing_since is not None:
        moments.append(situation.reading.failing_since + settings.unreachable_seconds - now)
    if any(pod.gpus and pod.started is not None for pod in seen.pods):
        moments.append(settings.poll_seconds)
    if seen.refused:
        moments.append(settings.refused_seconds)
    last_progress = unix_time(situation.previous.last_progress_time)
    if last_progress is not None and situation.outcome is None and not situation.job.spec.suspend:
        moments.append(last_progress + situation.job.spec.retry.hang_timeout.seconds - now)
    return min((max(moment, 0.0) + 0.1 for moment in moments if moment is not None and moment > -1.0), default=None)
