"""Schedules of overlapping faults. A schedule is a pure function of its seed and its number of faults.

The kinds of faults come from decks that hold each kind once: seed 1 takes the first cards, seed 2 the next ones, and so
on. So consecutive seeds hit with all kinds before one is repeated. Order, pauses, targets and durations are drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

_SHORT_PAUSE_SECONDS = (0.5, 6.0)
"""The fault comes while the job has not recovered from the one before."""
_LONG_PAUSE_SECONDS = (20.0, 45.0)
"""In most cases, steps are made before the next fault."""
_SHORT_PAUSES = 0.6
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


@dataclass(frozen=True)
class PlannedFault:
    """One fault of a schedule.

    Attributes:
        at: seconds since the start of the schedule.
        target: selects what is hit, as a fraction in [0, 1) of all that could be.
        seconds: how long the fault lasts, if it lasts.
    """

    kind: FaultKind
    at: float
    target: float
    seconds: float


@dataclass(frozen=True)
class ChaosSchedule:
    """The faults of one run, in order."""

    seed: int
    faults: tuple[PlannedFault, ...]


def make_schedule(seed: int, num_faults: int) -> ChaosSchedule:
    """Return the schedule of a seed; seeds start at 1."""
    draw = random.Random(f"{seed} of {num_faults}")
    kinds = _kinds(seed, num_faults)
    draw.shuffle(kinds)
    times = accumulate(_pause(draw) for _ in kinds)
    return ChaosSchedule(
        seed,
        tuple(
            PlannedFault(kind, round(at, 1), round(draw.random(), 3), round(draw.uniform(*_DURATION_SECONDS), 1))
            for kind, at in zip(kinds, list(times), strict=True)
        ),
    )


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
