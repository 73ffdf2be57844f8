"""The decision of one reconcile of a sweep: which trials to start, suspend and resume, and the new status. Pure.

The status is written before a decision is executed: a trial is recorded with its parameters, and created then. An
operator that stops in between creates it later, under the same name. So no trial is lost, and none exists twice.

=============================================  ========================================================================
a trial is                                     if
=============================================  ========================================================================
started                                        fewer than ``maxConcurrent`` run, trials are left, the budget is not
                                               spent, and the sweep is not suspended
created                                        it is recorded as running, and has no job (also if somebody deleted it)
suspended, with the label ``pruned``           it is recorded as pruned; a user may resume such a job
suspended, with an annotation                  it runs, and the sweep is suspended
resumed                                        the sweep has suspended it, and is not suspended any more
=============================================  ========================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spotune.job_file.trials import trial_job
from spotune.sweep import BestTrialStatus, FinetuneSweep, FinetuneSweepStatus, TrialCountsStatus, TrialStatus
from spotune_operator.children.trial import PRUNED_LABEL, SUSPENDED_ANNOTATION, trial_manifest
from spotune_operator.kube.conditions import since, updated
from spotune_operator.settings import Settings
from spotune_operator.sweeps.findings import (
    SweepContext,
    phase,
    spent_budget,
    stalled_sweep_findings,
    sweep_findings,
)
from spotune_operator.sweeps.search import suggest
from spotune_operator.sweeps.state import ObservedSweep, TrialJob
from spotune_operator.sweeps.trials import updated_trials

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class TrialPatch:
    """A change of the FinetuneJob of a trial, as a merge patch.

    Attributes:
        job: The job.
        changes: The patch.
    """

    job: TrialJob
    changes: dict[str, Any]


@dataclass(frozen=True)
class SweepDecision:
    """The desired state of a sweep.

    Attributes:
        create: FinetuneJobs of trials to create; one that exists stays as it is.
        patch: Changes of FinetuneJobs.
        expired: Whether the sweep itself is deleted, by ``ttlSecondsAfterFinished``.
        status: The new status.
        requeue_after: Seconds until the next reconcile without an event; None: none is needed.
    """

    create: Sequence[dict[str, Any]]
    patch: Sequence[TrialPatch]
    expired: bool
    status: FinetuneSweepStatus
    requeue_after: float | None


def decide_sweep(
    sweep: FinetuneSweep,
    *,
    uid: str,
    generation: int,
    previous: FinetuneSweepStatus,
    observed: ObservedSweep,
    now: float,
    settings: Settings,
) -> SweepDecision:
    """The decision about a valid sweep.

    Args:
        sweep: The sweep.
        uid: Its ``metadata.uid``.
        generation: Its ``metadata.generation``.
        previous: The status of the last reconcile.
        observed: The state of the cluster.
        now: Unix time.
        settings: The operator's.
    """
    trials = updated_trials(sweep, previous.trials, observed.trials)
    trials += _started(sweep, trials)
    context = SweepContext(sweep, trials, observed)
    findings = list(sweep_findings(context))
    status = previous.model_copy(
        update={
            "observed_generation": generation,
            "phase": phase(context),
            "counts": _counts(context),
            "best": _best(sweep, trials),
            "gpu_hours": round(sum(trial.gpu_seconds for trial in trials) / _SECONDS_PER_HOUR, 3),
            "trials": trials,
            "conditions": updated(previous.conditions, findings, generation, now),
        }
    )
    expires_at = _expires_at(context, status)
    waits = [settings.rejected_retry_seconds] if context.blocked else []
    if expires_at is not None:
        waits.append(max(0.0, expires_at - now) + 0.1)
    return SweepDecision(
        create=[] if sweep.spec.suspend else list(_missing(sweep, uid, trials, observed)),
        patch=list(_patches(sweep, trials, observed)),
        expired=expires_at is not None and now >= expires_at,
        status=status,
        requeue_after=min(waits, default=None),
    )


def _expires_at(context: SweepContext, status: FinetuneSweepStatus) -> float | None:
    """Unix time at which the sweep is deleted; None: never, or it has not ended."""
    ttl = context.sweep.spec.ttl_seconds_after_finished
    if ttl is None or not context.has_ended:
        return None
    ended = since(status.conditions, "Failed" if context.has_failed else "Complete")
    return None if ended is None else ended + ttl


def stalled_sweep(previous: FinetuneSweepStatus, error: Exception, generation: int, now: float) -> FinetuneSweepStatus:
    """The status of a sweep whose spec is invalid; its trials are left alone."""
    conditions = updated(previous.conditions, stalled_sweep_findings(error), generation, now)
    changes = {"observed_generation": generation, "phase": "Stalled", "conditions": conditions}
    return previous.model_copy(update=changes)


def _started(sweep: FinetuneSweep, trials: Sequence[TrialStatus]) -> list[TrialStatus]:
    """Records of the trials that start now; one whose job would be invalid has failed at once."""
    started: list[TrialStatus] = []
    while not sweep.spec.suspend:
        known = [*trials, *started]
        number = max((trial.number for trial in known), default=-1) + 1
        running = sum(trial.state == "Running" for trial in known)
        if running >= sweep.spec.max_concurrent or number >= sweep.spec.num_trials or spent_budget(sweep, known):
            break
        started.append(_new_trial(sweep, number, known))
    return started


def _new_trial(sweep: FinetuneSweep, number: int, trials: Sequence[TrialStatus]) -> TrialStatus:
    parameters = suggest(sweep.spec, number, trials)
    trial = TrialStatus(number=number, name=sweep.trial_name(number), parameters=parameters)
    _, problems = trial_job(sweep, number, parameters)
    if not problems:
        return trial
    return trial.model_copy(update={"state": "Failed", "message": f"the job would be invalid: {problems[0]}"})


def _missing(
    sweep: FinetuneSweep, uid: str, trials: Sequence[TrialStatus], observed: ObservedSweep
) -> Iterator[dict[str, Any]]:
    """The jobs of running trials that do not exist."""
    for trial in trials:
        if trial.state == "Running" and trial.number not in observed.trials and trial.name not in observed.taken:
            job, _ = trial_job(sweep, trial.number, trial.parameters)
            yield trial_manifest(sweep, uid, trial.number, trial.parameters, job)


def _patches(sweep: FinetuneSweep, trials: Sequence[TrialStatus], observed: ObservedSweep) -> Iterator[TrialPatch]:
    for trial in trials:
        job = observed.trials.get(trial.number)
        if job is None or job.deleting:
            continue
        if trial.state == "Pruned":
            if not job.is_pruned:  # once: a user may resume it
                yield _patch(job, suspend=True, annotation=None, labels={PRUNED_LABEL: "true"})
        elif trial.state == "Running" and sweep.spec.suspend and not job.suspend:
            yield _patch(job, suspend=True, annotation="true")
        elif job.suspended_by_sweep and not sweep.spec.suspend:
            yield _patch(job, suspend=False, annotation=None)


def _patch(job: TrialJob, *, suspend: bool, annotation: str | None, labels: dict[str, str] | None = None) -> TrialPatch:
    """Suspend or resume a job, and set or remove the annotation of a suspended sweep."""
    metadata: dict[str, Any] = {"annotations": {SUSPENDED_ANNOTATION: annotation}}
    if labels is not None:
        metadata["labels"] = labels
    return TrialPatch(job, {"metadata": metadata, "spec": {"suspend": suspend}})


def _counts(context: SweepContext) -> TrialCountsStatus:
    states = [trial.state for trial in context.trials]
    return TrialCountsStatus(
        running=states.count("Running"),
        complete=states.count("Complete"),
        pruned=states.count("Pruned"),
        failed=states.count("Failed"),
        waiting=context.waiting,
    )


def _best(sweep: FinetuneSweep, trials: Sequence[TrialStatus]) -> BestTrialStatus | None:
    """The best complete trial; of equal ones the first."""
    complete = [trial for trial in trials if trial.state == "Complete" and trial.value is not None]
    if not complete:
        return None
    sign = 1 if sweep.spec.objective.direction == "minimize" else -1
    best = min(complete, key=lambda trial: sign * (trial.value or 0.0))
    assert best.value is not None, "a complete trial has a value"
    return BestTrialStatus(
        number=best.number, name=best.name, value=best.value, parameters=best.parameters, output=best.output
    )
