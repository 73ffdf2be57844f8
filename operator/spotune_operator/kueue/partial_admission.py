"""How many workers a job in a queue asks Kueue for.

Kueue admits the workers that an elastic job asks for together, or none of them: its own partial admission covers
``batch/v1`` Jobs only. So a job that is not admitted asks for fewer workers, down to its minimum. One that has all it
asks for asks for the rest again. Requests for a part are halved, so a job that gets ``k`` of ``n`` workers finds ``k``
after about ``log2(n)`` requests. It then keeps a request for one worker more in the queue, and Kueue admits it when
quota becomes free.

While a request for more waits, Kueue also holds back the pod that replaces a lost one. A lost worker makes the request
smaller, so it does not wait for quota that the job has already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

PATIENCE_SECONDS: Final = 30.0
"""Kueue decides within seconds; after this time, a request that is not admitted has no quota."""
SETTLED_SECONDS: Final = 10.0
"""Time until a job that has all that it asked for asks for more: its pods appear meanwhile."""


class Worker(Protocol):
    """A worker pod.

    Attributes:
        name: Its name.
        created: Unix time.
        held_back: Whether Kueue holds it back, because it has no quota.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def created(self) -> float: ...  # noqa: D102

    @property
    def held_back(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class QueueRequest:
    """The workers that a job asks its queue for.

    Attributes:
        workers: Number of worker pods.
        since: Unix time at which it began to ask for this number.
    """

    workers: int
    since: float


def next_request(
    previous: QueueRequest | None, workers: Sequence[Worker], count: int, minimum: int, now: float, *, suspended: bool
) -> QueueRequest:
    """The request from now on.

    Args:
        previous: The request so far; None before the first.
        workers: The worker pods that are not terminating.
        count: Desired number of workers.
        minimum: Smallest number of workers with which the job trains.
        now: Unix time.
        suspended: Whether Kueue keeps the whole RayCluster from running: it is not admitted, or was preempted.
    """
    if previous is None or previous.workers > count:
        return QueueRequest(count, now)
    asked, waiting = previous.workers, [pod.created for pod in workers if pod.held_back]
    admitted = len(workers) - len(waiting)
    if suspended or waiting:
        smallest = max(minimum, admitted + 1)
        waits_since = max(previous.since, min(waiting, default=previous.since))
        if asked > smallest and now - waits_since >= PATIENCE_SECONDS:
            return QueueRequest(max(smallest, (asked + admitted) // 2), now)
    elif asked < count and admitted >= asked and now - previous.since >= SETTLED_SECONDS:
        return QueueRequest(count, now)
    return previous


def next_change(request: QueueRequest, workers: Sequence[Worker], now: float) -> float | None:
    """Seconds until the request may change by the passage of time alone; None if it does not."""
    waiting = [pod.created + PATIENCE_SECONDS - now for pod in workers if pod.held_back]
    left = (*(request.since + wait - now for wait in (SETTLED_SECONDS, PATIENCE_SECONDS)), *waiting)
    return min((seconds for seconds in left if seconds > 0), default=None)


def withdrawn(workers: Sequence[Worker], asked: int) -> list[str]:
    """Names of the pods that a smaller request leaves out: of those that Kueue holds back, the newest.

    Without their names, KubeRay would delete any of the workers, also those that train.
    """
    waiting = sorted((pod for pod in workers if pod.held_back), key=lambda pod: (pod.created, pod.name))
    surplus = max(0, len(workers) - asked)
    return [pod.name for pod in waiting[len(waiting) - min(surplus, len(waiting)) :]]
