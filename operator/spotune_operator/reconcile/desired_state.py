"""Where a job is to be brought: to run, to stand still, or to be cleared away; and with how many workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal

from spotune.job import FinetuneJob, FinetuneJobStatus
from spotune_operator.children.raycluster import ON_DEMAND_GROUP, Replicas
from spotune_operator.kube.conditions import find, is_true, since
from spotune_operator.observe.state import Observed, Pod
from spotune_operator.observe.supervisor_status import Reading
from spotune_operator.settings import Settings

Outcome = Literal["trained", "failed"]


class Aim(StrEnum):
    """What is wanted of the RayCluster."""

    RUN = "run"
    """Pods as the job asks for them."""
    COMMIT = "commit"
    """As they are, while the supervisor commits and stops, because they are to go next."""
    FREE = "free"
    """No pods; the RayCluster stays, unless it is in a queue, where only Kueue may suspend it."""
    RELEASE = "release"
    """The head alone, which can still be asked: the job has ended."""
    LEAVE = "leave"
    """As it is: the job has ended and its user wants to look at it."""
    DELETE = "delete"
    """No RayCluster."""


@dataclass(frozen=True)
class Situation:
    """A job at one moment, with what every part of a decision needs to know of it.

    Attributes:
        job: The job.
        generation: ``metadata.generation`` of it.
        job_file: SHA-256 of the job file that its supervisor is to work by.
        templates: Hash of the pod template, by ``head`` or worker group.
        renewed: Whether the templates are others than at the last pass.
        previous: The status so far.
        seen: What is known of its surroundings.
        now: Unix time.
        settings: The operator's.
    """

    job: FinetuneJob
    generation: int
    job_file: str
    templates: dict[str, str]
    renewed: bool
    previous: FinetuneJobStatus
    seen: Observed
    now: float
    settings: Settings

    @property
    def reading(self) -> Reading:
        """What the supervisor last said; an empty one while there is nobody to ask."""
        return self.seen.reading or Reading()

    @property
    def unreachable(self) -> bool:
        """Whether the supervisor has been silent for so long that nobody waits for it."""
        failing = self.reading.failing_since
        return failing is not None and self.now - failing >= self.settings.unreachable_seconds

    @property
    def is_told(self) -> bool:
        """Whether the supervisor knows how training goes: a new one repeats at first what was said before it."""
        supervisor = self.reading.said.supervisor
        repeats = supervisor.state in ("preflight", "waiting") and self.is_training
        return self.reading.answer is not None and not repeats

    @property
    def is_training(self) -> bool:
        """Whether steps are made, as far as anybody can tell."""
        said = self.reading.said
        return said.phase in STEPPING and not (said.is_old or said.is_silent or self.unreachable)

    @cached_property
    def outdated(self) -> list[Pod]:
        """Pods of earlier templates."""
        pods = [pod for pod in self.seen.pods if pod.deleting_since is None]
        return [pod for pod in pods if pod.template != self.templates.get(_template_of(pod))]

    @cached_property
    def outcome(self) -> Outcome | None:
        """How the job ended, if it has."""
        supervisor = self.reading.said.supervisor
        if supervisor.job == self.job_file and not self.outdated:
            if supervisor.state == "trained":
                return "trained"
            if supervisor.state == "failed":
                return "failed"
        return self._earlier_outcome(is_current=supervisor.job in ("", self.job_file))

    def _earlier_outcome(self, *, is_current: bool) -> Outcome | None:
        """What the status says of the end, unless the job has been changed since."""
        conditions = self.previous.conditions
        if is_true(conditions, "Complete") and not self._is_to_train_longer():
            return "trained"
        failed = find(conditions, "Failed")
        if failed is None or failed.status != "True" or failed.observed_generation != self.generation:
            return None
        return "failed" if is_current else None

    def _is_to_train_longer(self) -> bool:
        trained, training = self.previous.trained, self.job.spec.training
        return trained is not None and (trained.epochs, trained.max_steps) != (training.epochs, training.max_steps)

    @cached_property
    def aim(self) -> Aim:
        """What is wanted of the RayCluster now."""
        if self.outcome is not None:
            if self.job.spec.cleanup.cluster == "keep":
                return Aim.LEAVE
            return Aim.DELETE if self.now >= self.cleanup_at else Aim.RELEASE
        if not (self.job.spec.suspend or self.outdated or self._is_being_freed()):
            return Aim.RUN
        if not self._is_being_freed() and self._is_worth_waiting_for():
            return Aim.COMMIT
        return Aim.DELETE if self.job.spec.cluster.queue_name else Aim.FREE

    def _is_being_freed(self) -> bool:
        """Whether pods are on their way out because the operator wanted it; in a queue it is Kueue that suspends."""
        cluster = self.seen.children.get("RayCluster")
        is_ours = cluster is not None and cluster.suspended and not self.job.spec.cluster.queue_name
        return is_ours and bool(self.seen.pods)

    @property
    def stands_still(self) -> bool:
        """Whether the job goes on later, and its pods are not wanted until then."""
        return self.outcome is None and self.aim in (Aim.COMMIT, Aim.FREE, Aim.DELETE)

    @property
    def cleanup_at(self) -> float:
        """Unix time at which the cluster of a job that has ended goes."""
        name = "Complete" if self.outcome == "trained" else "Failed"
        ended = since(self.previous.conditions, name) if is_true(self.previous.conditions, name) else None
        return (self.now if ended is None else ended) + self.job.spec.cleanup.after.seconds

    def _is_worth_waiting_for(self) -> bool:
        """Whether there is a supervisor that has something to commit, and may be able to."""
        head = self.seen.head
        stopped = self.reading.said.supervisor.state in ("stopped", "failed", "trained")
        return head is not None and head.runs and not stopped and not self.unreachable

    @property
    def preflight_passed(self) -> bool:
        """Whether the pods have shown that the job can be run; true from then on, until the pods are others."""
        earlier = is_true(self.previous.conditions, "PreflightPassed") and not self.renewed
        return earlier or self.reading.said.supervisor.preflight.passed

    @property
    def prepares_data(self) -> bool:
        """Whether the data has to be made before there is anything to train on."""
        dataset = self.job.spec.dataset
        return dataset.prepare is not None and dataset.train is None

    @property
    def data_prepared(self) -> bool:
        """Whether there is data to train on; true from then on, like ``preflight_passed``."""
        earlier = is_true(self.previous.conditions, "DataPrepared") and not self.renewed
        return not self.prepares_data or earlier or self.reading.said.phase in _AFTER_PREPARING

    @cached_property
    def replicas(self) -> Replicas:
        """Worker pods wanted: none before there is something that they can do."""
        if self.aim in (Aim.RELEASE, Aim.DELETE) or not (self.preflight_passed and self.data_prepared):
            return Replicas(0)
        count = self.job.spec.workers.count
        return Replicas(count, min(count, len(overdue(self.job, self.seen.workers, self.now))))


STEPPING: Final = frozenset({"Training", "Evaluating", "Exporting"})
"""Phases of the trainer in which it does what it is there for."""
_AFTER_PREPARING = frozenset({"WaitingForWorkers", "Loading", "Training", "Evaluating", "Exporting", "Done"})


def overdue(job: FinetuneJob, workers: Sequence[Pod], now: float) -> list[Pod]:
    """Workers that have waited for a spot node for so long that others take their place on demand.

    They go on waiting: when one of them runs, the one in its place goes.
    """
    if job.spec.workers.capacity != "spot-then-on-demand":
        return []
    after = job.spec.workers.on_demand_after.seconds
    return [pod for pod in _waiting_for_spot(workers) if now - pod.created >= after]


def next_overdue(job: FinetuneJob, workers: Sequence[Pod], now: float) -> float | None:
    """Seconds until the next worker has waited for too long."""
    if job.spec.workers.capacity != "spot-then-on-demand":
        return None
    left = [pod.created + job.spec.workers.on_demand_after.seconds - now for pod in _waiting_for_spot(workers)]
    return min((seconds for seconds in left if seconds > 0), default=None)


def _waiting_for_spot(workers: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in workers if pod.group != ON_DEMAND_GROUP and not pod.runs]


def _template_of(pod: Pod) -> str:
    return "head" if pod.component == "head" else pod.group
