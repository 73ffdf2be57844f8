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
from spotune.pools.on_demand import OnDemandUse
from spotune.units.timestamps import rfc3339
from spotune_operator.children.raycluster import Replicas
from spotune_operator.errors import StalledError
from spotune_operator.kube.conditions import Finding
from spotune_operator.observe.state import Pod
from spotune_operator.observe.supervisor_status import ProgressResponse
from spotune_operator.reconcile.limits.nodes import is_short, nodes_of
from spotune_operator.settings import Settings

DEADLINE: Final = "DeadlineAtRisk"
DECISION_SECONDS: Final = 60.0
"""Longest time between two decisions: ``interval`` of ``Switching``."""
_NEW_SPEED: Final = 0.05
"""Relative change of the measured speed that is written to the status."""
_HOUR: Final = 3600.0
_NOT_MEASURED: Final = "workers.onDemandAfter decides about on-demand nodes"


def refuse_past_deadline(job: FinetuneJob, created: float) -> None:
    """Raise StalledError for a deadline that was in the past when the job was created."""
    for problem in deadline_problems(job, created):
        raise StalledError(DEADLINE_FIELD, problem.message)


def deadline_status(
    job: FinetuneJob,
    previous: FinetuneJobStatus,
    progress: ProgressResponse,
    workers: Sequence[Pod],
    *,
    created: float,
    now: float,
    active: bool,
) -> DeadlineStatus | None:
    """The deadline as a time, and the last measured speed; None without a deadline.

    The speed outlives the worker group that it was measured on, because it is needed while there is none.

    Args:
        job: The job.
        previous: The status of the last reconcile.
        progress: The supervisor's progress.
        workers: Its worker pods.
        created: Unix time of the job's creation.
        now: Unix time.
        active: Whether the workers train, evaluate or export: only then their speed is measured.
    """
    if job.spec.deadline is None:
        return None
    before = previous.deadline or DeadlineStatus()
    seconds, measured_workers = before.seconds_per_step, before.measured_workers
    left = (progress.total_steps or 0) - (progress.step or 0)
    running = sum(pod.runs for pod in workers) if active else 0
    if progress.phase == "Training" and progress.eta_seconds is not None and left > 0 and running > 0:
        measured = progress.eta_seconds / left
        if seconds is None or measured_workers != running or abs(measured - seconds) > _NEW_SPEED * seconds:
            seconds, measured_workers = float(f"{measured:.3g}"), running
    at = rfc3339(job.spec.deadline.at(created))
    waiting = (before.waiting_since or rfc3339(math.floor(now))) if is_short(job.spec.workers, workers) else None
    return DeadlineStatus(time=at, seconds_per_step=seconds, measured_workers=measured_workers, waiting_since=waiting)


@dataclass(frozen=True)
class DeadlineDecision:
    """What the policy decides for the workers.

    Attributes:
        decision: Of the policy.
        slack: Seconds that may still pass without training; negative: by so much the job is late.
        replicas: The worker pods to ask for; None: those without a deadline.
        on_demand_pools: With pools, when those on demand carry workers.
    """

    decision: Decision
    slack: float
    replicas: Replicas | None
    on_demand_pools: OnDemandUse


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
    count = job.spec.workers.count
    nodes = nodes_of(job.spec.workers, workers, status, measured, settings, now)
    is_safe = nodes.capacity == "on-demand" or nodes.paid >= count
    newest = progress.last_checkpoint or status.last_checkpoint
    committed = newest.step if newest is not None else 0
    done = status.step if progress.step is None else progress.step
    speed = {measured.measured_workers or count: measured.seconds_per_step}
    work = work_seconds(max(0, total - (done if is_safe else committed)), speed, count)
    switching = Switching(settings.spot_start_seconds, settings.on_demand_start_seconds, DECISION_SECONDS)
    pays = nodes.capacity == "on-demand" or nodes.paid_since is not None
    is_starting = nodes.paid_since is not None and not nodes.paid
    spot_price, on_demand_price = nodes.prices
    state = JobState(
        work=work,
        to_deadline=deadline.at(created) - now,
        markets=(Market(nodes.market, spot_price, nodes.has_spot, _spot_lifetime(status, job)),),
        on_demand_price=on_demand_price,
        holds=nodes.market if nodes.has_spot else "",
        on_demand=pays,
        starting=max(0.0, switching.on_demand_start - (now - (nodes.paid_since or now))) if is_starting else 0.0,
        waited=nodes.waited,
    )
    decision = decide(state, switching)
    keeps_paying = pays and state.slack < switching.slack_for_spot
    moves = decision.outlook is not Outlook.IN_TIME or keeps_paying
    has_choice, replicas, use = nodes.capacity == "spot-then-on-demand", None, OnDemandUse.AS_LISTED
    if has_choice and job.spec.workers.pools:
        use = _use(decision, moves=moves)
    elif has_choice and workers:
        replicas = _replicas(decision, count, nodes.missing, nodes.paid, moves=moves)
    return DeadlineDecision(decision, state.slack, replicas, use)


def _use(decision: Decision, *, moves: bool) -> OnDemandUse:
    """Which pools carry workers for a decision: those on demand once they stand in for missing nodes, or all."""
    if moves:
        return OnDemandUse.FIRST
    return OnDemandUse.AS_LISTED if decision.choice is Choice.ON_DEMAND else OnDemandUse.NOT_YET


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


def deadline_finding(job: FinetuneJob, decided: DeadlineDecision | None) -> Finding | None:
    """The finding ``DeadlineAtRisk``: what was decided and why, in times so coarse that it rarely changes."""
    if job.spec.deadline is None:
        return None
    workers, queue = job.spec.workers, job.spec.cluster.queue_name
    if decided is None:
        rule = "workers.poolPatience decides about pools" if workers.pools else _NOT_MEASURED
        rule = f"the queue {queue} decides" if queue and not workers.pools else rule
        return Finding(DEADLINE, "Unknown", "NotMeasured", f"the speed is not measured yet: until then {rule}")
    outlook, left = decided.decision.outlook, f"about {_coarse(abs(decided.slack))}"
    capacities: set[str] = {pool.capacity for pool in workers.pools} or {*workers.capacity.split("-then-")}
    if outlook is Outlook.LATE:
        remedy = "set a later deadline or more workers, or suspend the job"
        return Finding(DEADLINE, "True", outlook, f"training ends {left} late even on on-demand nodes: {remedy}")
    if outlook is Outlook.NO_SLACK and "spot" in capacities:
        return Finding(
            DEADLINE, "True", outlook, _without_slack(left, queue, capacities, has_pools=bool(workers.pools))
        )
    by_queue = queue if queue and not workers.pools else ""
    return Finding(DEADLINE, "False", Outlook.IN_TIME, _in_time(decided.decision, left, by_queue, capacities))


def _without_slack(left: str, queue: str, capacities: set[str], *, has_pools: bool) -> str:
    """What happens without slack: workers move to on-demand nodes if the job may have them and asks for them itself."""
    if "on-demand" not in capacities:
        remedy = "add a pool with capacity: on-demand" if has_pools else "set capacity: spot-then-on-demand"
        return f"{left} of slack is left, and a lost node may take more: {remedy}"
    if has_pools:
        return (
            f"{left} of slack is too little for spot nodes: workers move to on-demand pools, as far as these have room"
        )
    if queue:
        return (
            f"{left} of slack is too little for spot nodes, and the queue {queue} decides which nodes the workers get: "
            "give the job a higher queuePriorityClass, or pools"
        )
    return f"{left} of slack is too little for spot nodes: all workers move to on-demand nodes"


def _in_time(decision: Decision, left: str, queue: str, capacities: set[str]) -> str:
    """What the job does while there is slack.

    Args:
        decision: Of the policy.
        left: The slack.
        queue: The queue, if that alone decides which nodes the workers get.
        capacities: Kinds of nodes that the workers may have.
    """
    match decision.choice:
        case Choice.DONE:
            return "all steps are done"
        case Choice.SPOT:
            return f"trains on spot nodes, with {left} of slack"
        case _ if queue:
            return f"the queue {queue} decides which nodes the workers get, with {left} of slack"
        case _ if "spot" not in capacities:
            return f"all nodes are on-demand, with {left} of slack"
        case Choice.WAIT:
            return f"waits for spot nodes, with {left} of slack"
    return f"on-demand nodes stand in for missing spot nodes, so that {left} of slack is kept"


def _coarse(seconds: float) -> str:
    """A duration in whole hours, or in steps of ten minutes below two hours."""
    unit = _HOUR if seconds >= 2 * _HOUR else 600.0
    return duration(math.floor(seconds / unit) * unit) if seconds >= unit else "a few min"
