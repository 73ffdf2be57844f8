"""What a job's deadline means for its workers now.

The policy itself is ``spotune.deadline.policy``. This module knows where its numbers are: work left and speed in the
supervisor's progress, losses and GPU seconds in the status, waiting workers in the pods, prices in the settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spotune.deadline.history import expected_lifetime
from spotune.deadline.policy import decide
from spotune.deadline.terms import Choice, Decision, JobState, Market, Outlook, Switching, work_seconds
from spotune.formatting import duration
from spotune.job import DeadlineStatus, FinetuneJob, FinetuneJobStatus
from spotune.job_file.deadlines import DEADLINE_FIELD, deadline_problems
from spotune.units.timestamps import rfc3339
from spotune_operator.children.raycluster import ON_DEMAND_GROUP, Replicas
from spotune_operator.errors import StalledError
from spotune_operator.kube.conditions import Finding
from spotune_operator.observe.state import Pod
from spotune_operator.observe.supervisor_status import ProgressResponse
from spotune_operator.settings import Settings

DEADLINE: Final = "DeadlineAtRisk"
DECISION_SECONDS: Final = 60.0
"""Longest time between two decisions: ``interval`` of ``Switching``."""
_ASSUMED_PRICES: Final = (1.0, 3.0)
"""Of spot and on-demand nodes without settings: their ratio is what the policy needs."""
_NEW_SPEED: Final = 0.05
"""Relative change of the measured speed that is written to the status."""
_HOUR: Final = 3600.0


def refuse_past_deadline(job: FinetuneJob, created: float) -> None:
    """Raise StalledError for a deadline that was in the past when the job was created."""
    for problem in deadline_problems(job, created):
        raise StalledError(DEADLINE_FIELD, problem.message)


def deadline_status(
    job: FinetuneJob, previous: FinetuneJobStatus, progress: ProgressResponse, running: int, created: float
) -> DeadlineStatus | None:
    """The deadline as a time, and the last measured speed; None without a deadline.

    The speed outlives the worker group that it was measured on, because it is needed while there is none.

    Args:
        job: The job.
        previous: The status of the last reconcile.
        progress: The supervisor's progress.
        running: Number of workers that run.
        created: Unix time of the job's creation.
    """
    if job.spec.deadline is None:
        return None
    before = previous.deadline or DeadlineStatus()
    seconds, workers = before.seconds_per_step, before.measured_workers
    left = (progress.total_steps or 0) - (progress.step or 0)
    if progress.phase == "Training" and progress.eta_seconds is not None and left > 0 and running > 0:
        measured = progress.eta_seconds / left
        if seconds is None or workers != running or abs(measured - seconds) > _NEW_SPEED * seconds:
            seconds, workers = float(f"{measured:.3g}"), running
    at = rfc3339(job.spec.deadline.at(created))
    return DeadlineStatus(time=at, seconds_per_step=seconds, measured_workers=workers)


@dataclass(frozen=True)
class DeadlineDecision:
    """What the policy decides for the workers.

    Attributes:
        decision: Of the policy.
        slack: Seconds that may still pass without training; negative: by so much the job is late.
        replicas: The worker pods to ask for; None: those without a deadline.
    """

    decision: Decision
    slack: float
    replicas: Replicas | None


def decide_deadline(
    job: FinetuneJob,
    status: FinetuneJobStatus,
    progress: ProgressResponse,
    measured: DeadlineStatus | None,
    workers: Sequence[Pod],
    *,
    created: float,
    now: float,
    settings: Settings,
) -> DeadlineDecision | None:
    """The decision for a job that has not ended; None without a deadline, or before the speed is known.

    Work is what is not committed yet, so a loss undoes nothing of what counts. On-demand nodes are not lost: with all
    workers on them, work is what is not done yet.

    Args:
        job: The job.
        status: The status of the last reconcile: steps that are done and committed, losses, GPU seconds.
        progress: The supervisor's progress, which knows newer steps.
        measured: Its deadline and speed.
        workers: Its worker pods.
        created: Unix time of the job's creation.
        now: Unix time.
        settings: The operator's.
    """
    deadline, total = job.spec.deadline, progress.total_steps or status.total_steps
    if deadline is None or measured is None or measured.seconds_per_step is None or total is None:
        return None
    count, capacity = job.spec.workers.count, job.spec.workers.capacity
    on_demand = [pod for pod in workers if pod.group == ON_DEMAND_GROUP]
    waiting = sum(not pod.runs for pod in workers if pod.group != ON_DEMAND_GROUP)
    paid = sum(pod.runs for pod in on_demand)
    is_safe = capacity == "on-demand" or paid >= count
    newest = progress.last_checkpoint or status.last_checkpoint
    committed = newest.step if newest is not None else 0
    done = status.step if progress.step is None else progress.step
    speed = {measured.measured_workers or count: measured.seconds_per_step}
    work = work_seconds(max(0, total - (done if is_safe else committed)), speed, count)
    switching = Switching(settings.spot_start_seconds, settings.on_demand_start_seconds, DECISION_SECONDS)
    has_spot = waiting == 0 and not on_demand and capacity != "on-demand" and len(workers) >= count
    pays = capacity == "on-demand" or bool(on_demand)
    asked = min((pod.created for pod in on_demand), default=now)
    spot_price, on_demand_price = _prices(settings)
    state = JobState(
        work=work,
        to_deadline=deadline.at(created) - now,
        markets=(Market("spot", spot_price, has_spot, _spot_lifetime(status, job)),),
        on_demand_price=on_demand_price,
        holds="spot" if has_spot else "",
        on_demand=pays,
        starting=0.0 if paid or not on_demand else max(0.0, switching.on_demand_start - (now - asked)),
        waited=max(
            (now - pod.created for pod in workers if pod.group != ON_DEMAND_GROUP and not pod.runs), default=0.0
        ),
    )
    decision = decide(state, switching)
    is_asked = capacity == "spot-then-on-demand" and bool(workers)
    keeps_paying = pays and state.slack < switching.slack_for_spot
    moves = decision.outlook is not Outlook.IN_TIME or keeps_paying
    replicas = _replicas(decision, count, waiting, paid, moves=moves) if is_asked else None
    return DeadlineDecision(decision, state.slack, replicas)


def _replicas(decision: Decision, count: int, waiting: int, paid: int, *, moves: bool) -> Replicas:
    """Worker pods for a decision.

    On-demand workers stand in for waiting ones until these run. Without slack all workers move: spot workers train
    until on-demand workers run in their place.
    """
    if moves:
        return Replicas(max(0, count - paid), count)
    return Replicas(count, min(count, waiting) if decision.choice is Choice.ON_DEMAND else 0)


def _spot_lifetime(status: FinetuneJobStatus, job: FinetuneJob) -> float:
    """Seconds that spot nodes are expected to stay, by the time that this job had all of them, and its losses."""
    gpus = job.spec.workers.count * max(1, job.spec.workers.gpus)
    losses = status.restarts.worker_lost + status.restarts.preempted
    return expected_lifetime(status.gpu_seconds.spot / gpus, losses)


def _prices(settings: Settings) -> tuple[float, float]:
    """Prices of a spot node and of the same node on demand: the first pair that the operator's values have."""
    pairs = ((each.price.amount, each.on_demand.amount) for each in settings.node_prices if each.on_demand is not None)
    return next((pair for pair in pairs if 0 < pair[0] < pair[1]), _ASSUMED_PRICES)


def deadline_finding(job: FinetuneJob, decided: DeadlineDecision | None) -> Finding | None:
    """The finding ``DeadlineAtRisk``: what was decided and why, in times so coarse that it rarely changes."""
    if job.spec.deadline is None:
        return None
    if decided is None:
        why = "the speed is not measured yet: until then workers.onDemandAfter decides about on-demand nodes"
        return Finding(DEADLINE, "Unknown", "NotMeasured", why)
    outlook, capacity = decided.decision.outlook, job.spec.workers.capacity
    left = f"about {_coarse(abs(decided.slack))}"
    match outlook:
        case Outlook.LATE:
            remedy = "set a later deadline or more workers, or suspend the job"
            return Finding(DEADLINE, "True", outlook, f"training ends {left} late even on on-demand nodes: {remedy}")
        case Outlook.NO_SLACK if capacity == "spot":
            why = f"{left} of slack is left, and a lost node may take more: set capacity: spot-then-on-demand"
            return Finding(DEADLINE, "True", outlook, why)
        case Outlook.NO_SLACK if capacity == "spot-then-on-demand":
            why = f"{left} of slack is too little for spot nodes: all workers move to on-demand nodes"
            return Finding(DEADLINE, "True", outlook, why)
    by_choice = {
        Choice.SPOT: f"trains on spot nodes, with {left} of slack",
        Choice.WAIT: f"waits for spot nodes, with {left} of slack",
        Choice.ON_DEMAND: f"on-demand nodes stand in for missing spot nodes, so that {left} of slack is kept",
        Choice.DONE: "all steps are done",
    }
    return Finding(DEADLINE, "False", Outlook.IN_TIME, by_choice[decided.decision.choice])


def _coarse(seconds: float) -> str:
    """A duration in whole hours, or in steps of ten minutes below two hours."""
    unit = _HOUR if seconds >= 2 * _HOUR else 600.0
    return duration(math.floor(seconds / unit) * unit) if seconds >= unit else "a few min"
