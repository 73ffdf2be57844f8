"""`spotune suspend` and `spotune resume`: save a checkpoint and release the pods, and continue later."""

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
    is_current,
    is_true,
    job_path,
    outcome,
    pods_of,
    reason_and_message,
    with_cause,
)
from spotune_operator.cli.cluster.volume_pod import Notify
from spotune_operator.cli.status import condition_heading, notable_conditions
from spotune_operator.errors import KubernetesError

POLL_SECONDS: Final = 2.0


def set_suspended(cluster: Cluster, name: str, *, suspend: bool) -> bool:
    """Set ``spec.suspend`` of a job and return whether it changed.

    Raises:
        UsageError: The job does not exist, or it has ended.
        KubernetesError: The user may not patch the job, or the API server does not answer.
    """
    job = get_job(cluster, name)
    if suspend and (ended := outcome(job)):
        raise UsageError(f"{name} has already ended ({ended}), so it cannot be suspended")
    if bool(job["spec"].get("suspend")) == suspend:
        return False
    cluster.patch(job_path(cluster, name), {"spec": {"suspend": suspend}})
    return True


def wait_until_suspended(cluster: Cluster, name: str, notify: Notify, poller: Poller) -> None:
    """Wait until all pods of a suspended job are gone.

    Args:
        cluster: The cluster with the job.
        name: Name of the job.
        notify: Prints what is still pending, whenever it changes.
        poller: Polls until done or timed out.

    Raises:
        UsageError: The job was resumed or deleted in the meantime.
        KubernetesError: The wait timed out.
    """

    def pending() -> str:
        job = get_job(cluster, name)
        if not job["spec"].get("suspend"):
            raise UsageError(f"{name} was resumed in the meantime")
        pods = sorted(pod["metadata"]["name"] for pod in pods_of(cluster, name))
        if outcome(job) or (not pods and is_current(job)):
            return ""
        return (
            f"{len(pods)} pod(s) left: {', '.join(pods)}" if pods else "the operator has not processed the change yet"
        )

    poller.wait(pending, notify)


def wait_until_training(cluster: Cluster, name: str, notify: Notify, poller: Poller) -> None:
    """Wait until a resumed job trains or has completed; arguments as for ``wait_until_suspended``.

    Raises:
        JobError: The job failed or is stalled.
        UsageError: The job was suspended or deleted in the meantime.
        KubernetesError: The wait timed out.
    """

    def pending() -> str:
        job = get_job(cluster, name)
        if job["spec"].get("suspend"):
            raise UsageError(f"{name} was suspended again in the meantime")
        if not is_current(job):
            return "the operator has not processed the change yet"
        for bad in ("Failed", "Stalled"):
            found = condition(job, bad)
            if found is not None and found["status"] == "True":
                raise JobError(f"{name}: {bad}: {reason_and_message(with_cause(job, found))}")
        return "" if is_true(job, "Training") or outcome(job) else _current_activity(job)

    poller.wait(pending, notify)


def _current_activity(job: Job) -> str:
    found = [
        f"{condition_heading(item)}: {reason_and_message(item)}"
        for item in notable_conditions(job)
        if item["type"] != "Suspended"
    ]
    return "; ".join(found) or "the job is starting"


class Poller:
    """Polls a condition until it holds or a timeout expires.

    Args:
        seconds: Timeout in seconds; None: no timeout.
        clock: Returns monotonic seconds.
        pause: Sleeps for the given seconds.
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

    def wait(self, pending: Callable[[], str], notify: Notify) -> None:
        """Call ``pending`` until it returns an empty string; it describes what is still pending.

        Raises:
            KubernetesError: The timeout expired.
        """
        start, notified = self._clock(), ""
        while state := pending():
            if state != notified:
                notify(f"waiting: {state}")
                notified = state
            if self._seconds is not None and self._clock() - start >= self._seconds:
                raise KubernetesError(f"timed out after {duration(self._seconds)}; still waiting: {state}")
            self._pause(POLL_SECONDS)
