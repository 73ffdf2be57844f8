"""The records of trials in the status, brought up to date from their FinetuneJobs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotune.sweep import FinetuneSweep, FinetuneSweepSpec, TrialEvaluationStatus, TrialStatus
from spotune_operator.sweeps.pruning import continues, reached_rungs, rung_steps
from spotune_operator.sweeps.state import TrialJob

_MAX_EVALUATIONS: Final = 32
"""Evaluations of a trial that the status holds: 200 trials have to fit into one object."""
_MAX_MESSAGE_LENGTH: Final = 500
_COUNTED_SECONDS: Final = 60.0
"""GPU seconds of a running trial after which the status is written again for them alone."""
_INVALID: Final = "InvalidSpec"


def updated_trials(
    sweep: FinetuneSweep, previous: Sequence[TrialStatus], jobs: Mapping[int, TrialJob]
) -> list[TrialStatus]:
    """The records of all trials, by number.

    A job without a record is adopted: the status was lost. It is not pruned by values of that time, because it went on
    when it was judged by them. The parameters of a job are those of its annotation. A record without a job stays.

    Args:
        sweep: The sweep.
        previous: The records of the last reconcile.
        jobs: The FinetuneJobs, by number of the trial.
    """
    records = {trial.number: trial for trial in previous}
    for number, job in jobs.items():
        records.setdefault(number, TrialStatus(number=number, name=job.name, parameters=dict(job.parameters or {})))
        records[number] = _updated(sweep.spec, records[number], job)
    for number in sorted(records):
        others = [trial for trial in records.values() if trial.number != number]
        is_adopted = all(trial.number != number for trial in previous)
        records[number] = _judged(sweep.spec, records[number], others, may_prune=not is_adopted)
    return [records[number] for number in sorted(records)]


def _updated(spec: FinetuneSweepSpec, record: TrialStatus, job: TrialJob) -> TrialStatus:
    """The record of a trial after its job."""
    changes: dict[str, Any] = {"output": job.output}
    if job.parameters is not None:
        changes["parameters"] = dict(job.parameters)
    evaluation = job.evaluation(spec.objective.metric)
    last = record.evaluations[-1].step if record.evaluations else -1
    if evaluation is not None and evaluation[0] > last:
        step, value = evaluation
        newest = TrialEvaluationStatus(step=step, value=value)
        changes |= {"evaluations": _thinned([*record.evaluations, newest]), "value": value}
    changes |= _outcome(record, job, changes.get("value", record.value), evaluation)
    is_counted = changes["state"] != "Running" or job.gpu_seconds >= record.gpu_seconds + _COUNTED_SECONDS
    if is_counted and job.gpu_seconds > record.gpu_seconds:  # less if the job was deleted and created again
        changes["gpu_seconds"] = job.gpu_seconds
    return record.model_copy(update=changes)


def _outcome(
    record: TrialStatus, job: TrialJob, value: float | None, evaluation: tuple[int, float] | None
) -> dict[str, Any]:
    """State, value and message of a trial. A pruned one that somebody has resumed may still become complete."""
    if job.message("Complete") is not None:
        final = evaluation[1] if evaluation is not None else value  # of the exported model, not of the last step
        if final is None:
            return {"state": "Failed", "message": "the job ended without a value of the objective"}
        return {"state": "Complete", "value": final, "message": ""}
    if record.state == "Pruned" or job.is_pruned:
        return {"state": "Pruned"}
    failed = job.message("Failed")
    if failed is None and job.conditions.get("Stalled", ("",))[0] == _INVALID:
        failed = job.message("Stalled")
    if failed is not None:
        return {"state": "Failed", "message": failed[:_MAX_MESSAGE_LENGTH]}
    return {"state": "Running", "message": ""}


def _judged(
    spec: FinetuneSweepSpec, record: TrialStatus, others: Sequence[TrialStatus], *, may_prune: bool
) -> TrialStatus:
    """The record of a trial with its values at the rungs that it has reached, pruned if others are better there."""
    if not record.evaluations or record.state not in ("Running", "Complete"):
        return record
    pruning, newest = spec.early_stopping, record.evaluations[-1]
    rungs = list(record.rungs)
    while len(rungs) < reached_rungs(pruning, newest.step):
        rung = len(rungs)
        there = [other.rungs[rung] for other in others if len(other.rungs) > rung]
        rungs.append(newest.value)
        is_better = continues(newest.value, there, pruning.reduction_factor, spec.objective.direction)
        if may_prune and record.state == "Running" and not is_better:
            message = _why_pruned(spec, newest, rung, count=len(there) + 1)
            return record.model_copy(update={"rungs": rungs, "state": "Pruned", "message": message})
    return record.model_copy(update={"rungs": rungs}) if rungs != record.rungs else record


def _why_pruned(spec: FinetuneSweepSpec, newest: TrialEvaluationStatus, rung: int, *, count: int) -> str:
    """Why a trial is pruned, which is one of this number of trials at a rung."""
    factor = spec.early_stopping.reduction_factor
    best = f"among the best 1/{factor}" if count >= factor else "the best one"
    return (
        f"pruned at step {newest.step}: {spec.objective.metric} {newest.value:.5g} is not {best} of {count} trials at "
        f"{rung_steps(spec.early_stopping, rung)} steps"
    )


def _thinned(evaluations: list[TrialEvaluationStatus]) -> list[TrialEvaluationStatus]:
    """The evaluations; every second one if there are too many, and always the last one."""
    if len(evaluations) <= _MAX_EVALUATIONS:
        return evaluations
    return [*evaluations[:-1:2], evaluations[-1]]
