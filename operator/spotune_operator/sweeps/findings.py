"""The conditions and the phase of a sweep. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from spotune.sweep import FinetuneSweep, TrialStatus
from spotune_operator.kube.conditions import Finding, reference
from spotune_operator.sweeps.state import ObservedSweep, TrialJob

_SECONDS_PER_HOUR: Final = 3600.0


@dataclass(frozen=True)
class SweepContext:
    """A sweep with its trials.

    Attributes:
        sweep: The sweep.
        trials: The records of its trials, those that start now included.
        observed: The state of the cluster.
    """

    sweep: FinetuneSweep
    trials: Sequence[TrialStatus]
    observed: ObservedSweep

    @cached_property
    def running(self) -> list[TrialStatus]:
        """The trials that have not ended."""
        return [trial for trial in self.trials if trial.state == "Running"]

    @property
    def spent(self) -> str:
        """Why no more trials start; empty while the budget lasts."""
        return spent_budget(self.sweep, self.trials)

    @property
    def waiting(self) -> int:
        """Number of trials that will start later."""
        return 0 if self.spent else max(0, self.sweep.spec.num_trials - len(self.trials))

    @property
    def has_ended(self) -> bool:
        """Whether no trial runs, and none will start."""
        return not self.running and self.waiting == 0

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a model, or because too many trials failed."""
        complete = any(trial.state == "Complete" for trial in self.trials)
        return self.has_ended and (not complete or bool(_too_many_failed(self.sweep, self.trials)))

    @cached_property
    def blocked(self) -> str:
        """Why a trial cannot be created; empty if all can."""
        for trial in self.running:
            if trial.name in self.observed.taken:
                return (
                    f"a FinetuneJob {trial.name} exists that this sweep did not create: delete it, or create a sweep "
                    "with another name"
                )
            if trial.name in self.observed.refused:
                return f"the API server rejected the FinetuneJob {trial.name}: {self.observed.refused[trial.name]}"
        return ""

    @property
    def running_jobs(self) -> list[TrialJob]:
        """The FinetuneJobs of running trials."""
        found = (self.observed.trials.get(trial.number) for trial in self.running)
        return [job for job in found if job is not None]

    @property
    def is_suspended(self) -> bool:
        """Whether the sweep is suspended, and no trial has pods."""
        return self.sweep.spec.suspend and all("Suspended" in job.conditions for job in self.running_jobs)


def spent_budget(sweep: FinetuneSweep, trials: Sequence[TrialStatus]) -> str:
    """Why no more trials start; empty while the budget lasts."""
    budget = sweep.spec.budget
    hours = sum(trial.gpu_seconds for trial in trials) / _SECONDS_PER_HOUR
    if budget.max_gpu_hours and hours >= budget.max_gpu_hours:
        return f"{hours:.1f} GPU hours are used, and budget.maxGpuHours is {budget.max_gpu_hours:g}"
    return _too_many_failed(sweep, trials)


def _too_many_failed(sweep: FinetuneSweep, trials: Sequence[TrialStatus]) -> str:
    failed, limit = [trial for trial in trials if trial.state == "Failed"], sweep.spec.budget.max_failed_trials
    if not limit or len(failed) < limit:
        return ""
    first = failed[0]
    count = "1 trial has" if len(failed) == 1 else f"{len(failed)} trials have"
    return f"{count} failed, and budget.maxFailedTrials is {limit}; {first.name}: {first.message}"


def phase(context: SweepContext) -> str:
    """The phase of a sweep: one word for people."""
    if context.has_ended:
        return "Failed" if context.has_failed else "Complete"
    if context.sweep.spec.suspend:
        return "Suspended" if context.is_suspended else "Suspending"
    return "Stalled" if _stalled(context).status == "True" else "Running"


def sweep_findings(context: SweepContext) -> Iterator[Finding]:
    """The conditions of a sweep whose spec is valid."""
    stalled, summary = _stalled(context), _summary(context)
    yield stalled
    yield _suspended(context)
    if context.has_failed:
        reason, message = _failure(context)
        yield Finding("Ready", "False", reason, reference("Failed"))
        yield Finding("Reconciling", "False", reason)
        yield Finding("Complete", "False", reason, reference("Failed"))
        yield Finding("Failed", "True", reason, message)
        return
    yield Finding("Failed", "False", "NotFailed", summary)
    if context.has_ended:
        reason = "BudgetSpent" if context.spent else "AllTrialsEnded"
        message = f"{summary}; {context.spent}" if context.spent else summary
        yield Finding("Ready", "True", "Complete", message)
        yield Finding("Reconciling", "False", "Complete")
        yield Finding("Complete", "True", reason, message)
        return
    yield Finding("Complete", "False", "Running", summary)
    if context.sweep.spec.suspend:
        yield Finding("Ready", "False", "Suspended", "spec.suspend is true")
        yield Finding("Reconciling", "False" if context.is_suspended else "True", "Suspended", "spec.suspend is true")
    elif stalled.status == "True":
        yield Finding("Ready", "False", stalled.reason, reference("Stalled"))
        yield Finding("Reconciling", "False", stalled.reason)
    else:
        yield Finding("Ready", "False", "Running", summary)
        yield Finding("Reconciling", "True", "Running", summary)


def stalled_sweep_findings(error: Exception) -> list[Finding]:
    """The conditions of a sweep whose spec is invalid."""
    return [
        Finding("Ready", "False", "InvalidSpec", reference("Stalled")),
        Finding("Reconciling", "False", "InvalidSpec"),
        Finding("Stalled", "True", "InvalidSpec", str(error)),
    ]


def _stalled(context: SweepContext) -> Finding:
    """Whether only a person can help: a trial cannot be created, or the job of one is stalled."""
    if context.has_failed:
        return Finding("Stalled", "True", *_failure(context))
    if context.blocked:
        return Finding("Stalled", "True", "TrialRefused", context.blocked)
    for job in context.running_jobs:
        message = job.message("Stalled")
        if message is not None:
            return Finding("Stalled", "True", "TrialStalled", f"trial {job.name} is stalled: {message}")
    return Finding("Stalled", "False", "NothingToMend", "no action is needed")


def _suspended(context: SweepContext) -> Finding:
    if not context.sweep.spec.suspend:
        return Finding("Suspended", "False", "NotSuspended", "spec.suspend is false")
    if context.is_suspended:
        return Finding("Suspended", "True", "Suspended", "no trial has pods, and no other one starts")
    return Finding("Suspended", "Unknown", "Suspending", "trials save their checkpoints and release their nodes")


def _failure(context: SweepContext) -> tuple[str, str]:
    """Reason and message of a sweep that has failed."""
    if message := _too_many_failed(context.sweep, context.trials):
        return "TooManyFailedTrials", message
    if context.spent:
        return "BudgetSpent", f"no trial is complete: {context.spent}"
    failed = next((trial for trial in context.trials if trial.state == "Failed"), None)
    cause = f"; {failed.name}: {failed.message}" if failed is not None else ""
    return "NoCompleteTrial", f"all trials have ended, and none is complete{cause}"


def _summary(context: SweepContext) -> str:
    """How many trials there are in each state."""
    counts = {
        state.lower(): sum(trial.state == state for trial in context.trials)
        for state in ("Complete", "Pruned", "Failed", "Running")
    }
    counts["waiting"] = context.waiting
    return "trials: " + ", ".join(f"{count} {state}" for state, count in counts.items() if count)
