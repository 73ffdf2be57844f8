"""Schedules of overlapping faults. A schedule is a pure function of its seed and of the numbers of faults and jobs.

The kinds of faults come from decks that hold each kind once: seed 1 takes the first cards, seed 2 the next ones, and so
on. So consecutive seeds hit with all kinds before one is repeated. Order, pauses, targets, jobs and durations are
drawn. A short schedule that still shows a defect is kept as JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import accumulate

FORMAT = 2
"""Of schedules and their records. In format 1, a schedule had one job and no service."""
FAULTS, JOBS = 40, 2
_SHORT_PAUSE_SECONDS = (0.5, 5.0)
"""The fault comes while the jobs have not recovered from the one before."""
_LONG_PAUSE_SECONDS = (10.0, 25.0)
"""In most cases, steps are made before the next fault."""
_SHORT_PAUSES = 0.7
_DURATION_SECONDS = (4.0, 14.0)


class FaultKind(StrEnum):
    """What a fault hits, and how."""

    RANK_KILLED = "rank `kill -9`"
    RANK_PAUSED = "rank stopped for seconds"
    AGENT_KILLED = "node agent `kill -9`"
    RAYLET_KILLED = "raylet of a worker `kill -9`"
    WORKER_CONTAINER_KILLED = "container of a worker killed"
    HEAD_CONTAINER_KILLED = "Ray container of the head killed"
    GCS_KILLED = "Ray's GCS `kill -9`"
    SUPERVISOR_KILLED = "supervisor killed"
    DRIVER_KILLED = "driver `kill -9`"
    DRIVER_STOPPED = "driver's Ray job stopped"
    WORKER_POD_DELETED = "worker pod deleted"
    WORKER_POD_FORCED = "worker pod deleted by force"
    WORKER_PODS_FORCED = "all worker pods deleted by force"
    HEAD_POD_DELETED = "head pod deleted"
    HEAD_POD_FORCED = "head pod deleted by force"
    HEAD_AND_WORKER_DELETED = "head and one worker deleted"
    PODS_FORCED = "every pod deleted by force"
    EVERYTHING = "every pod, the operator and KubeRay at once"

    WORKER_NODE_CRASHED = "node of a worker crashed, and back"
    WORKER_NODES_CRASHED = "nodes of all workers crashed, and back"
    WORKER_NODE_RECLAIMED = "node of a worker reclaimed with notice, and back"
    WORKER_NODE_DRAINED = "node of a worker drained, and back"
    WORKER_NODE_CUT = "node of a worker cut off the network for seconds"
    NOTICE_ALONE = "taint that announces an end, and no end"
    NOTICE_AND_CRASH = "taint that announces an end, then a crash"
    HEAD_NODE_CRASHED = "node of the head crashed, and back"
    OPERATOR_KILLED = "operator `kill -9`"
    OPERATOR_POD_DELETED = "operator pod deleted"
    OPERATOR_DOWN = "operator removed for seconds"
    OPERATOR_CUT = "operator cut off from the pods for seconds"
    API_SERVER_PAUSED = "API server paused for seconds"
    API_SERVER_RESTARTED = "API server restarted"
    KUBERAY_DOWN = "KubeRay's operator stopped for seconds"
    SCHEDULER_DOWN = "scheduler stopped for seconds"
    CONTROLLERS_DOWN = "controller manager stopped for seconds"

    RAY_CLUSTER_DELETED = "RayCluster deleted"
    APPLIED_AGAIN = "manifest applied by somebody else"
    SUSPENDED = "suspended for seconds, and resumed"
    RESIZED = "`workers.count` changed"
    STATUS_PATCHED = "status patched by a stranger"
    CHECKPOINT_TORN = "newest checkpoint torn"
    VOLUME_FULL = "volume full for seconds"
    VOLUME_FROZEN = "volume takes no writes for seconds"
    VOLUME_SLOW = "volume slow for seconds"

    REPLICA_PROCESS_KILLED = "replica of the service `kill -9`"
    REPLICA_CONTAINER_KILLED = "container of a replica killed"
    REPLICA_CONTAINERS_KILLED = "containers of all replicas killed"
    REPLICA_RAYLET_KILLED = "raylet of a replica `kill -9`"
    REPLICA_POD_DELETED = "replica pod deleted"
    REPLICA_POD_FORCED = "replica pod deleted by force"
    REPLICA_NODE_CRASHED = "node of a replica crashed, and back"
    REPLICA_NODE_RECLAIMED = "node of a replica reclaimed with notice, and back"
    REPLICA_NODE_DRAINED = "node of a replica drained, and back"
    REPLICA_NODE_CUT = "node of a replica cut off the network for seconds"
    SERVE_CONTROLLER_KILLED = "Ray Serve's controller `kill -9`"
    SERVE_GCS_KILLED = "GCS of the service `kill -9`"
    SERVE_HEAD_CONTAINER_KILLED = "Ray container of the service's head killed"
    SERVE_HEAD_POD_DELETED = "head pod of the service deleted"
    SERVE_HEAD_POD_FORCED = "head pod of the service deleted by force"
    REDIS_PAUSED = "Redis of the service paused for seconds"
    SERVICE_APPLIED_AGAIN = "service applied by somebody else"
    SERVICE_STATUS_PATCHED = "status of the service patched by a stranger"


@dataclass(frozen=True)
class PlannedFault:
    """One fault of a schedule.

    Attributes:
        at: seconds since the start of the schedule.
        target: selects what is hit, as a fraction in [0, 1) of all that could be.
        seconds: how long the fault lasts, if it lasts.
        job: index of the job that it hits; faults of the service and of the control plane hit what all share.
    """

    kind: FaultKind
    at: float
    target: float
    seconds: float
    job: int = 0


@dataclass(frozen=True)
class ChaosSchedule:
    """The faults of one run, in order."""

    seed: int
    faults: tuple[PlannedFault, ...]
    num_jobs: int = JOBS

    def with_faults(self, faults: Sequence[PlannedFault]) -> ChaosSchedule:
        """The schedule with some of its faults, at their times."""
        return ChaosSchedule(self.seed, tuple(faults), self.num_jobs)


def make_schedule(seed: int, num_faults: int = FAULTS, num_jobs: int = JOBS) -> ChaosSchedule:
    """Return the schedule of a seed; seeds start at 1."""
    draw = random.Random(f"{seed} of {num_faults} for {num_jobs}")
    kinds = _kinds(seed, num_faults)
    draw.shuffle(kinds)
    times = list(accumulate(_pause(draw) for _ in kinds))
    return ChaosSchedule(
        seed,
        tuple(
            PlannedFault(
                kind,
                at=round(at, 1),
                target=round(draw.random(), 3),
                seconds=round(draw.uniform(*_DURATION_SECONDS), 1),
                job=draw.randrange(num_jobs),
            )
            for kind, at in zip(kinds, times, strict=True)
        ),
        num_jobs,
    )


def to_json(schedule: ChaosSchedule) -> str:
    """The schedule as JSON, a fault in each line."""
    faults = ",\n  ".join(json.dumps({**asdict(fault), "kind": fault.kind.name}) for fault in schedule.faults)
    head = f'"format": {FORMAT}, "seed": {schedule.seed}, "jobs": {schedule.num_jobs}'
    return f'{{{head}, "faults": [\n  {faults}\n]}}\n'


def from_json(text: str) -> ChaosSchedule:
    """The schedule that `to_json` wrote."""
    value = json.loads(text)
    faults = (PlannedFault(**{**fault, "kind": FaultKind[fault["kind"]]}) for fault in value["faults"])
    return ChaosSchedule(value["seed"], tuple(faults), value["jobs"])


def _kinds(seed: int, num_faults: int) -> list[FaultKind]:
    """The cards of this seed, from decks that lie one behind the other."""
    first = (seed - 1) * num_faults
    return [_deck(card // len(FaultKind))[card % len(FaultKind)] for card in range(first, first + num_faults)]


def _deck(number: int) -> list[FaultKind]:
    deck = list(FaultKind)
    random.Random(f"deck {number}").shuffle(deck)
    return deck


def _pause(draw: random.Random) -> float:
    return draw.uniform(*(_SHORT_PAUSE_SECONDS if draw.random() < _SHORT_PAUSES else _LONG_PAUSE_SECONDS))
