"""Suspend and resume, and wait for a job, sweep or service: until it has ended, is ready, trains or has no pods."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from spotune.crd.definition import FINETUNE_JOBS, CustomResource
from spotune.errors import JobError, KubernetesError, TimedOutError, UsageError
from spotune.formatting import duration
from spotune_client.cluster.api_errors import is_final
from spotune_client.cluster.client import Cluster, Manifest
from spotune_client.cluster.conditions import condition_heading, notable_conditions
from spotune_client.cluster.jobs import (
    Job,
    condition,
    get_job,
    is_current,
    is_true,
    outcome,
    pods_of,
    reason_and_message,
    with_cause,
)
from spotune_client.cluster.resources import get_object, object_path
from spotune_client.cluster.volume_pod import Notify

POLL_SECONDS: Final = 2.0

Pause = Callable[[float], None]
"""Sleeps for the given seconds. It may raise, to end what waits."""


def polled(
    cluster: Cluster, resource: CustomResource, name: str, notify: Notify, pause: Pause = time.sleep
) -> Iterator[Manifest]:
    """Yield an object at once and after every pause, without an end.

    If the API server stops answering, polling continues, and yields the last known state: the object is not affected.

    Args:
        cluster: The cluster with the object.
        resource: Its kind.
        name: Its name.
        notify: Called with a message when the API server stops answering.
        pause: Sleeps between two requests.

    Raises:
        UsageError: The object does not exist, or was deleted in the meantime.
        KubernetesError: The API server does not answer the first request, or denies access.
    """
    found = get_object(cluster, resource, name)
    api_is_down = False
    while True:
        yield found
        pause(POLL_SECONDS)
        try:
            found = get_object(cluster, resource, name)
            api_is_down = False
        except UsageError as error:
            raise UsageError(f"{name} was deleted before it ended") from error
        except KubernetesError as error:
            if is_final(error):
                raise
            if not api_is_down:
                notify(f"{error}; retrying")
            api_is_down = True


def raise_if_failed(job: Job, *, if_stalled: bool = False) -> None:
    """Raise if a job, sweep or service has failed.

    Args:
        job: The object as the API server returned it.
        if_stalled: Raise if it is stalled, too.

    Raises:
        JobError: It has failed, or is stalled; the message has the cause.
    """
    if not is_current(job):
        return
    name = job["metadata"]["name"]
    failed, stalled = condition(job, "Failed"), condition(job, "Stalled")
    if failed is not None and failed["status"] == "True":
        raise JobError(f"{name} failed: {with_cause(job, failed).get('message') or 'no reason is given'}")
    if if_stalled and stalled is not None and stalled["status"] == "True":
        raise JobError(f"{name}: Stalled: {reason_and_message(with_cause(job, stalled))}")


def set_suspended(cluster: Cluster, name: str, *, suspend: bool, resource: CustomResource = FINETUNE_JOBS) -> bool:
    """Set ``spec.suspend`` of a job, sweep or service, and return whether it changed.

    Raises:
        UsageError: It does not exist, or has ended.
        KubernetesError: The user may not patch it, or the API server does not answer.
    """
    job = get_object(cluster, resource, name)
    if suspend and (ended := outcome(job)):
        raise UsageError(f"{name} has already ended ({ended}), so it cannot be suspended")
    if bool(job["spec"].get("suspend")) == suspend:
        return False
    cluster.patch(object_path(cluster, resource, name), {"spec": {"suspend": suspend}})
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
        TimedOutError: The timeout expired.
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
        TimedOutError: The timeout expired.
    """

    def pending() -> str:
        job = get_job(cluster, name)
        if job["spec"].get("suspend"):
            raise UsageError(f"{name} was suspended again in the meantime")
        if not is_current(job):
            return "the operator has not processed the change yet"
        raise_if_failed(job, if_stalled=True)
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

        If the API server does not answer, or fails, polling continues.

        Raises:
            TimedOutError: The timeout expired.
            KubernetesError: The API server denies access, its certificate is wrong, or it has no such kind.
        """
        start, notified = self._clock(), ""
        while state := _state_or_problem(pending):
            if state != notified:
                notify(f"waiting: {state}")
                notified = state
            if self._seconds is not None and self._clock() - start >= self._seconds:
                raise TimedOutError(f"timed out after {duration(self._seconds)}; still waiting: {state}")
            self._pause(POLL_SECONDS)


def _state_or_problem(pending: Callable[[], str]) -> str:
    """What is still pending, or why that is not known at the moment."""
    try:
        return pending()
    except KubernetesError as error:
        if is_final(error):
            raise
        return f"{error}; retrying"
