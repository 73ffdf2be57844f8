"""`spotune suspend` and `spotune resume`: free the pods of a job after a last commit, and let it go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from spotune.errors import JobError, UsageError
from spotune.formatting import duration
from spotune_operator.cli.cluster.client import Cluster
from spotune_operator.cli.cluster.jobs import (
    Job,
    condition,
    get_job,
    holds,
    is_current,
    job_path,
    outcome,
    pods_of,
    sentence,
)
from spotune_operator.cli.status import heading, noteworthy
from spotune_operator.errors import KubernetesError

POLL_SECONDS: Final = 2.0

Say = Callable[[str], None]


def set_suspended(cluster: Cluster, name: str, *, suspend: bool) -> bool:
    """Ask for a job's pods to go, or to come back; whether anything had to be changed.

    Raises:
        UsageError: There is no such job, or it has ended and has no pods to free.
        KubernetesError: The user may not change it, or the API server does not answer.
    """
    job = get_job(cluster, name)
    if suspend and (ended := outcome(job)):
        raise UsageError(f"{name} has ended ({ended}): there is nothing left to suspend")
    if bool(job["spec"].get("suspend")) == suspend:
        return False
    cluster.patch(job_path(cluster, name), {"spec": {"suspend": suspend}})
    return True


def wait_until_suspended(cluster: Cluster, name: str, say: Say, patience: Patience) -> None:
    """Wait until the last pod of a suspended job is gone.

    Args:
        cluster: Where it is.
        name: Of the job.
        say: Tells a person what is waited for, whenever that is something else.
        patience: How long.

    Raises:
        UsageError: The job is resumed or deleted meanwhile.
        KubernetesError: It takes too long.
    """

    def missing() -> str:
        job = get_job(cluster, name)
        if not job["spec"].get("suspend"):
            raise UsageError(f"{name} was resumed meanwhile")
        pods = sorted(pod["metadata"]["name"] for pod in pods_of(cluster, name))
        if outcome(job) or (not pods and is_current(job)):
            return ""
        return f"{len(pods)} pod(s) left: {', '.join(pods)}" if pods else "the operator has not seen the change yet"

    patience.wait(missing, say)


def wait_until_training(cluster: Cluster, name: str, say: Say, patience: Patience) -> None:
    """Wait until a resumed job makes steps, or has ended; arguments as for ``wait_until_suspended``.

    Raises:
        JobError: It failed, or something in it has to be mended first.
        UsageError: The job is suspended or deleted meanwhile.
        KubernetesError: It takes too long.
    """

    def missing() -> str:
        job = get_job(cluster, name)
        if job["spec"].get("suspend"):
            raise UsageError(f"{name} was suspended again meanwhile")
        if not is_current(job):
            return "the operator has not seen the change yet"
        for bad in ("Failed", "Stalled"):
            if holds(job, bad):
                raise JobError(f"{name}: {bad}: {sentence(condition(job, bad) or {})}")
        return "" if holds(job, "Training") or outcome(job) else _what_it_does(job)

    patience.wait(missing, say)


def _what_it_does(job: Job) -> str:
    found = [f"{heading(item)}: {sentence(item)}" for item in noteworthy(job) if item["type"] != "Suspended"]
    return "; ".join(found) or "it starts"


class Patience:
    """How long somebody waits.

    Args:
        seconds: At most; None for ever.
        clock: Monotonic seconds.
        pause: Waits for so many seconds.
    """

    def __init__(
        self,
        seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._pause = pause

    def wait(self, missing: Callable[[], str], say: Say) -> None:
        """Ask again and again what is missing, until nothing is.

        Raises:
            KubernetesError: Something was missing for too long.
        """
        start, said = self._clock(), ""
        while what := missing():
            if what != said:
                say(f"waiting: {what}")
                said = what
            if self._seconds is not None and self._clock() - start >= self._seconds:
                raise KubernetesError(f"waited for {duration(self._seconds)}, and still: {what}")
            self._pause(POLL_SECONDS)
