"""The desired state of a job's RayCluster: its target, and its number of workers.

The target follows from this table. The first row whose condition holds decides:

===  ===================================================================  =============  ==============================
row  condition                                                            target         what happens to the pods
===  ===================================================================  =============  ==============================
1    the job has ended, and ``cleanup.cluster`` is ``keep``               ``KEEP``       nothing
2    the job has ended, and ``cleanup.after`` has passed since            ``DELETE``     deleted with the RayCluster
3    the job has ended                                                    ``HEAD_ONLY``  workers are deleted
4    the pods need not stop                                               ``RUN``        created as the spec asks
5    the supervisor can still commit                                      ``COMMIT``     kept until it has committed
6    the RayCluster is in a queue, so that only Kueue may suspend it      ``DELETE``     deleted with the RayCluster
7    otherwise                                                            ``SUSPEND``    deleted; the RayCluster stays
===  ===================================================================  =============  ==============================

- *The job has ended*: ``outcome`` is ``trained`` or ``failed``. A change of the spec can reopen it (see ``outcome``).
- *The pods must stop* if the spec has ``suspend: true``, if its ``maxCost`` is reached, if a pod has an outdated
  template, or if a suspension by the operator is under way: it is completed before the pods are created again.
- *The supervisor can commit* if the head runs, the supervisor has not stopped and is reachable, and no suspension by
  the operator is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal

from spotune.job import DeadlineStatus, FinetuneJob, FinetuneJobStatus
from spotune.pools.on_demand import OnDemandUse
from spotune.pools.terms import Choice
from spotune.units.timestamps import unix_time
from spotune_operator.children.raycluster import ON_DEMAND_GROUP, WORKER_GROUP, Replicas
from spotune_operator.kube.conditions import find, is_true, since
from spotune_operator.kueue.partial_admission import QueueRequest, next_request, withdrawn
from spotune_operator.observe.state import Observed, Pod
from spotune_operator.observe.supervisor_status import ACTIVE_PHASES, Freshness, PollResult, ProgressResponse
from spotune_operator.providers import Provider
from spotune_operator.reconcile.limits.cost import is_over_budget
from spotune_operator.reconcile.limits.deadline import DeadlineDecision, deadline_status, decide_deadline
from spotune_operator.reconcile.limits.fewer_workers import desired_count, is_unaware, present_count
from spotune_operator.reconcile.pools.choosing import choose_pools, replicas_of, unchanged_pools
from spotune_operator.settings import Settings

Outcome = Literal["trained", "failed"]

_PHASES_AFTER_PREPARATION: Final = ACTIVE_PHASES | {"WaitingForWorkers", "Loading", "Done"}
"""Phases that the trainer reaches only with prepared data."""


class ClusterTarget(StrEnum):
    """The desired state of the RayCluster."""

    RUN = "run"
    """Head and workers as the spec asks for them."""
    COMMIT = "commit"
    """Unchanged while the supervisor commits and stops; the pods are deleted next."""
    SUSPEND = "suspend"
    """No pods, but the RayCluster stays."""
    HEAD_ONLY = "head-only"
    """The head alone: the job has ended, and its supervisor still serves the result."""
    KEEP = "keep"
    """Unchanged: the job has ended, and the spec asks to keep the cluster."""
    DELETE = "delete"
    """No RayCluster."""


_PAUSED: Final = (ClusterTarget.COMMIT, ClusterTarget.SUSPEND, ClusterTarget.DELETE)


@dataclass(frozen=True)
class ReconcileContext:
    """The input of a reconcile, and what follows from it.

    The properties build on one another in this order: freshness of the progress, outcome, target, prerequisites,
    replicas.

    Attributes:
        job: The job.
        generation: Its ``metadata.generation``.
        job_file: SHA-256 of the job file for its supervisor.
        templates: Hash of the pod template, by ``head`` or worker group.
        templates_changed: Whether a template differs from the last reconcile.
        previous: The status of the last reconcile.
        observed: The state of the cluster.
        now: Unix time.
        settings: The operator's.
        provider: The cloud of the nodes; None if it does not matter.
    """

    job: FinetuneJob
    generation: int
    job_file: str
    templates: dict[str, str]
    templates_changed: bool
    previous: FinetuneJobStatus
    observed: Observed
    now: float
    settings: Settings
    provider: Provider | None = None

    # Progress and its freshness

    @property
    def poll(self) -> PollResult:
        """The last poll of the supervisor; an empty one without a head pod."""
        return self.observed.poll or PollResult()

    @property
    def progress(self) -> ProgressResponse:
        """The last response of the supervisor; an empty one before the first."""
        return self.poll.progress

    @property
    def freshness(self) -> Freshness:
        """How far ``progress`` can be trusted."""
        return self.poll.freshness(self.now, self.settings.unreachable_seconds)

    @property
    def is_unreachable(self) -> bool:
        """Whether polls have failed for so long that the operator no longer waits for the supervisor."""
        return self.freshness is Freshness.UNREACHABLE

    @property
    def has_own_progress(self) -> bool:
        """Whether ``progress`` is the supervisor's own; a new one first repeats the progress of its predecessor."""
        return self.poll.response is not None and self.freshness is not Freshness.REPEATED

    @property
    def is_outdated(self) -> bool:
        """Whether somebody else has written a later step of the same generation since the last poll.

        An operator that is being replaced still sees what its successor writes; its own last poll is older than that.
        """
        if self.poll.requested_at >= self.observed.changed_elsewhere_at or self.progress.step is None:
            return False
        return self.progress.generation == self.previous.generation and self.progress.step < self.previous.step

    @property
    def is_stopping(self) -> bool:
        """Whether the supervisor was told to stop, or has stopped."""
        return self.progress.supervisor.state in ("stopping", "stopped")

    @property
    def is_still_stopping(self) -> bool:
        """Whether the workers of a resumed job still stop: what the supervisor reports is from before."""
        return self.is_stopping and not self.is_unreachable and not is_true(self.previous.conditions, "Training")

    @property
    def is_active(self) -> bool:
        """Whether the workers train, evaluate or export, as far as the operator can tell."""
        return self.progress.phase in ACTIVE_PHASES and self.freshness.is_known and not self.is_still_stopping

    # Outcome

    @cached_property
    def outdated_pods(self) -> list[Pod]:
        """Pods of an earlier template that are not terminating yet."""
        pods = [pod for pod in self.observed.pods if pod.deleting_since is None]
        return [pod for pod in pods if pod.template != self.templates.get(_template_of(pod))]

    @cached_property
    def outcome(self) -> Outcome | None:
        """How the job has ended; None while it has not.

        The supervisor decides, if it works on the current job file in current pods. Otherwise the status does: a
        trained job stays trained unless the spec asks for longer training, a failed job stays failed until the spec
        changes.
        """
        supervisor = self.progress.supervisor
        if supervisor.job == self.job_file and not self.outdated_pods:
            if supervisor.state == "trained":
                return "trained"
            if supervisor.state == "failed":
                return "failed"
        return self._recorded_outcome(has_current_job=supervisor.job in ("", self.job_file))

    def _recorded_outcome(self, *, has_current_job: bool) -> Outcome | None:
        """The outcome that the status records, unless the job has been changed since."""
        conditions = self.previous.conditions
        if is_true(conditions, "Complete") and not self._asks_for_longer_training():
            return "trained"
        failed = find(conditions, "Failed")
        if failed is None or failed.status != "True" or failed.observed_generation != self.generation:
            return None
        return "failed" if has_current_job else None

    def _asks_for_longer_training(self) -> bool:
        trained, training = self.previous.trained, self.job.spec.training
        return trained is not None and (trained.epochs, trained.max_steps) != (training.epochs, training.max_steps)

    # Deadline and limit of cost

    @cached_property
    def measured(self) -> DeadlineStatus | None:
        """The deadline as a time, and the speed that decides about it; None without a deadline."""
        return deadline_status(
            self.job,
            self.previous,
            self.progress,
            self.observed.workers,
            created=self.observed.created,
            now=self.now,
            active=self.is_active,
        )

    @cached_property
    def deadline(self) -> DeadlineDecision | None:
        """What the deadline asks for; None without one, before the speed is known, and after the end."""
        if self.outcome is not None:
            return None
        return decide_deadline(
            self.job,
            self.previous,
            self.progress,
            self.measured,
            self.observed.workers,
            created=self.observed.created,
            now=self.now,
            settings=self.settings,
        )

    @property
    def must_pause(self) -> bool:
        """Whether the job is to commit and to release its nodes: the spec says so, or its limit of cost is reached."""
        return self.job.spec.suspend or is_over_budget(self.job, self.previous)

    # Target

    @cached_property
    def target(self) -> ClusterTarget:
        """The desired state of the RayCluster; the comments name the rows of the module's table."""
        if self.outcome is not None:
            return self._target_of_ended_job()
        is_suspending = self._is_suspending()
        if not (self.must_pause or self.outdated_pods or is_suspending):
            return ClusterTarget.RUN  # row 4
        if not is_suspending and self._can_commit():
            return ClusterTarget.COMMIT  # row 5
        return ClusterTarget.DELETE if self.job.spec.cluster.queue_name else ClusterTarget.SUSPEND  # rows 6 and 7

    def _target_of_ended_job(self) -> ClusterTarget:
        """Rows 1 to 3."""
        if self.job.spec.cleanup.cluster == "keep":
            return ClusterTarget.KEEP
        return ClusterTarget.DELETE if self.now >= self.cleanup_at else ClusterTarget.HEAD_ONLY

    def _is_suspending(self) -> bool:
        """Whether the operator has suspended the RayCluster and pods are left; in a queue, Kueue suspends."""
        cluster = self.observed.children.get("RayCluster")
        is_by_operator = cluster is not None and cluster.suspended and not self.job.spec.cluster.queue_name
        return is_by_operator and bool(self.observed.pods)

    def _can_commit(self) -> bool:
        """Whether a reachable supervisor runs that has not stopped yet."""
        head = self.observed.head
        has_stopped = self.progress.supervisor.state in ("stopped", "failed", "trained")
        return head is not None and head.runs and not has_stopped and not self.is_unreachable

    @property
    def is_paused(self) -> bool:
        """Whether the pods stop although the job has not ended: it continues later."""
        return self.outcome is None and self.target in _PAUSED

    @property
    def cleanup_at(self) -> float:
        """Unix time at which the cluster of a job that has ended is deleted."""
        return self._ended_at + self.job.spec.cleanup.after.seconds

    @property
    def expires_at(self) -> float | None:
        """Unix time at which the job itself is deleted; None: never, or it has not ended."""
        ttl = self.job.spec.ttl_seconds_after_finished
        return None if ttl is None or self.outcome is None else self._ended_at + ttl

    @property
    def _ended_at(self) -> float:
        """Unix time at which the job has ended: now, if this reconcile finds it."""
        name = "Complete" if self.outcome == "trained" else "Failed"
        ended = since(self.previous.conditions, name) if is_true(self.previous.conditions, name) else None
        return self.now if ended is None else ended

    # Prerequisites of workers, and their number

    @property
    def preflight_passed(self) -> bool:
        """Whether the preflight has passed; this stays true until the pod templates change."""
        earlier = is_true(self.previous.conditions, "PreflightPassed") and not self.templates_changed
        return earlier or self.progress.supervisor.preflight.passed

    @property
    def prepares_data(self) -> bool:
        """Whether the job has raw data to prepare before training."""
        return self.job.spec.prepares_data

    @property
    def data_prepared(self) -> bool:
        """Whether prepared data exists; this stays true until the pod templates change."""
        earlier = is_true(self.previous.conditions, "DataPrepared") and not self.templates_changed
        return not self.prepares_data or earlier or self.progress.phase in _PHASES_AFTER_PREPARATION

    @cached_property
    def count(self) -> int:
        """The desired number of workers: ``workers.count``, if it is lower than before once the trainer knows that."""
        # Also before they train: the last poll is some seconds old. An operator that has just started waits for one.
        is_running = self.freshness.is_known and not self.is_still_stopping
        is_first = self.observed.poll is not None and self.freshness is Freshness.NO_RESPONSE
        unaware = is_first or (is_running and is_unaware(self.progress.supervisor, self.job_file))
        before = desired_count(self.previous.workers)
        return present_count(self.job.spec.workers.count, before, self.observed.workers, is_unaware=unaware)

    @cached_property
    def pool_choice(self) -> Choice | None:
        """The desired workers of each pool; None without pools."""
        workers = self.job.spec.workers
        if not workers.pools:
            return None
        if self.is_paused:
            return unchanged_pools(self.job, self.observed.pods, self.previous)  # no move while the workers commit
        count = self.count if self.preflight_passed and self.data_prepared else 0
        asked = self.deadline.on_demand_pools if self.deadline is not None else OnDemandUse.AS_LISTED
        return choose_pools(self.job, self.observed.pods, self.previous, count, self.generation, self.now, asked)

    @cached_property
    def replicas(self) -> Replicas:
        """The desired number of worker pods: 0 until the preflight has passed and the data is prepared."""
        has_work = self.preflight_passed and self.data_prepared
        if self.target in (ClusterTarget.HEAD_ONLY, ClusterTarget.DELETE) or not has_work:
            return Replicas(0)
        if self.pool_choice is not None:
            return replicas_of(self.pool_choice)
        count, workers = self.count, self.observed.workers
        decided = self.deadline.replicas if self.deadline is not None and count == self.job.spec.workers.count else None
        if self.queue_request is None and decided is not None:
            return decided
        on_demand = min(count, len(overdue(self.job, workers, self.now)))
        if self.queue_request is None:
            return Replicas(count, on_demand)
        asked = self.queue_request.workers
        return Replicas(asked, on_demand, leaving={WORKER_GROUP: withdrawn(self._queued_workers, asked)})

    @cached_property
    def queue_request(self) -> QueueRequest | None:
        """What the job asks its queue for; None if it is in none, has pools, or has asked for nothing yet."""
        previous, workers = self.previous.queue, self.job.spec.workers
        if not self.job.spec.cluster.queue_name or workers.pools:
            return None
        since = unix_time(previous.since) if previous is not None else None
        asked = QueueRequest(previous.workers, since) if previous is not None and since is not None else None
        if self.target is not ClusterTarget.RUN or not (self.preflight_passed and self.data_prepared):
            return asked  # nothing changes while the workers commit
        return next_request(
            asked, self._queued_workers, self.count, workers.min_count, self.now, suspended=self.waits_in_queue
        )

    @property
    def waits_in_queue(self) -> bool:
        """Whether Kueue keeps the whole RayCluster from running: it is not admitted yet, or was preempted."""
        cluster = self.observed.children.get("RayCluster")
        return bool(self.job.spec.cluster.queue_name) and cluster is not None and cluster.suspended

    @property
    def needs_new_cluster(self) -> bool:
        """Whether the RayCluster is deleted and created again: Kueue has preempted it and cannot admit it again."""
        is_stuck = self.waits_in_queue and self.observed.children["RayCluster"].cannot_be_admitted
        return is_stuck and self.target is ClusterTarget.RUN and not self.observed.pods

    @property
    def _queued_workers(self) -> list[Pod]:
        return [pod for pod in self.observed.workers if pod.group == WORKER_GROUP]


def overdue(job: FinetuneJob, workers: Sequence[Pod], now: float) -> list[Pod]:
    """Workers that have waited for a spot node for ``onDemandAfter``: each gets an on-demand worker in its place.

    The spot worker stays pending. When it runs, its on-demand replacement is removed.
    """
    if job.spec.workers.capacity != "spot-then-on-demand":
        return []
    after = job.spec.workers.on_demand_after.seconds
    return [pod for pod in _waiting_for_spot(workers) if now - pod.created >= after]


def next_overdue(job: FinetuneJob, workers: Sequence[Pod], now: float) -> float | None:
    """Seconds until the next worker becomes overdue; None if none will."""
    if job.spec.workers.capacity != "spot-then-on-demand":
        return None
    left = [pod.created + job.spec.workers.on_demand_after.seconds - now for pod in _waiting_for_spot(workers)]
    return min((seconds for seconds in left if seconds > 0), default=None)


def _waiting_for_spot(workers: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in workers if pod.group != ON_DEMAND_GROUP and not pod.runs and not pod.held_back]


def _template_of(pod: Pod) -> str:
    return "head" if pod.component == "head" else pod.group
