"""The synchronous client: an API server, and the jobs, sweeps and services of a namespace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from spotune.custom_resource.object_names import TEAM_LABEL
from spotune.errors import NotFoundError, TimedOutError
from spotune.formatting import duration
from spotune_client.cluster.client import Cluster
from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
from spotune_client.cluster.resources import get_object, list_objects, object_path
from spotune_client.cluster.volume_pod import Notify
from spotune_client.fleet.summary import By, Fleet, fleet_of
from spotune_client.logs.job_logs import followed_lines, log_lines
from spotune_client.logs.service_logs import LogSelection, followed_service_lines, service_log_lines
from spotune_client.objects import Given, Stored, StoredJob, StoredService, StoredSweep, manifest_of
from spotune_client.report import report_page
from spotune_client.sweeps.page import page
from spotune_client.waiting import (
    POLL_SECONDS,
    Pause,
    Poller,
    polled,
    raise_if_failed,
    set_suspended,
    wait_until_suspended,
    wait_until_training,
)

T = TypeVar("T", bound=Stored[Any, Any])


def _silent(_: str) -> None:
    """Drop a message."""


class Objects(Generic[T]):
    """The objects of one kind.

    Every method raises ``KubernetesError`` if the API server does not answer, and ``RefusedError`` if it denies access;
    those with a name raise ``UsageError`` if there is no such object, with the nearest name.

    Args:
        cluster: The API server, and the namespace.
        stored: Class of the objects.
        notify: Called with messages about connections that broke, and temporary pods that start.
    """

    def __init__(self, cluster: Cluster, stored: type[T], notify: Notify = _silent) -> None:
        self._cluster = cluster
        self._stored = stored
        self._notify = notify

    def apply(self, given: Given, *, force: bool = False) -> T:
        """Create an object or change it, as ``kubectl apply --server-side``.

        Args:
            given: A Pydantic model, its content as in YAML, or the path of a YAML file.
            force: Take over fields that others, such as ``kubectl``, have set to other values.

        Raises:
            JobError: It is invalid; ``problems`` lists all errors. Nothing was sent.
            RefusedError: The API server rejected it, or another owner has set a field to another value.
        """
        cluster, manifest = self._to_send(given)
        path = object_path(cluster, self._stored.resource, manifest["metadata"]["name"])
        return self._stored(cluster.apply(path, manifest, force=force))

    def create(self, given: Given) -> T:
        """Create an object; raises ``RefusedError`` with status 409 if there is one of this name, else as ``apply``."""
        cluster, manifest = self._to_send(given)
        return self._stored(cluster.create(object_path(cluster, self._stored.resource), manifest))

    def get(self, name: str) -> T:
        """Get an object."""
        return self._stored(get_object(self._cluster, self._stored.resource, name))

    def list(self, *, everywhere: bool = False) -> list[T]:
        """The objects of the namespace, or of all namespaces, sorted by namespace and name."""
        return [self._stored(raw) for raw in list_objects(self._cluster, self._stored.resource, everywhere=everywhere)]

    def watch(self, name: str, *, pause: Pause = time.sleep) -> Iterator[T]:
        """Yield an object now and whenever it has changed, until it has ended.

        It is polled every 2 seconds, so of several changes in between only the last one is seen, and the right to
        ``get`` is enough. If the API server stops answering, the iteration goes on when it is back.

        Args:
            name: Name of the object.
            pause: Sleeps for the given seconds; may raise to end the iteration.

        Raises:
            UsageError: It does not exist, or was deleted in the meantime.
        """
        version = ""
        for raw in polled(self._cluster, self._stored.resource, name, self._notify, pause):
            found = self._stored(raw)
            if raw["metadata"]["resourceVersion"] != version:
                version = raw["metadata"]["resourceVersion"]
                yield found
            if found.outcome:
                return

    def wait(
        self,
        name: str,
        *,
        timeout: float | None = None,
        progress: Callable[[T], None] | None = None,
        fail_if_stalled: bool = False,
        pause: Pause = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> T:
        """Wait until a job or sweep is complete, or a service ready.

        Args:
            name: Name of the object.
            timeout: Maximum time in seconds; None: no limit.
            progress: Called with the object now and whenever it has changed.
            fail_if_stalled: Whether ``Stalled`` is an error. By default it is waited for a change of the object.
            pause: Sleeps for the given seconds.
            clock: Returns monotonic seconds.

        Raises:
            JobError: It failed, or is stalled.
            TimedOutError: The time is over.
            UsageError: It does not exist, or was deleted in the meantime.
        """
        start, version = clock(), ""
        for raw in polled(self._cluster, self._stored.resource, name, self._notify, pause):
            found = self._stored(raw)
            if progress is not None and raw["metadata"]["resourceVersion"] != version:
                version = raw["metadata"]["resourceVersion"]
                progress(found)
            raise_if_failed(raw, if_stalled=fail_if_stalled)
            if self._is_done(found):
                return found
            if timeout is not None and clock() - start >= timeout:
                raise TimedOutError(f"timed out after {duration(timeout)}: {name} is {found.phase}")
        raise AssertionError("polling does not end by itself")

    def suspend(self, name: str) -> bool:
        """Suspend an object: a job commits first, and its pods are removed. Returns whether it was not yet suspended.

        Raises:
            UsageError: It has already ended.
        """
        return set_suspended(self._cluster, name, suspend=True, resource=self._stored.resource)

    def resume(self, name: str) -> bool:
        """Resume an object; a job continues from its last checkpoint. Returns whether it was suspended."""
        return set_suspended(self._cluster, name, suspend=False, resource=self._stored.resource)

    def delete(self, name: str, *, wait: bool = False, timeout: float | None = None, pause: Pause = time.sleep) -> None:
        """Delete an object and its pods. A job's storage stays unless its ``storage.retain`` is false.

        Args:
            name: Name of the object.
            wait: Wait until it is gone.
            timeout: Maximum time to wait in seconds; None: no limit.
            pause: Sleeps for the given seconds.

        Raises:
            UsageError: It does not exist.
            TimedOutError: The time is over.
        """
        path = object_path(self._cluster, self._stored.resource, name)
        uid = get_object(self._cluster, self._stored.resource, name)["metadata"]["uid"]
        self._cluster.delete(path)

        def pending() -> str:
            try:
                left = self._cluster.get(path)
            except NotFoundError:
                return ""
            return f"{name} is being deleted" if left["metadata"]["uid"] == uid else ""

        if wait:
            Poller(timeout, pause=pause).wait(pending, self._notify)

    def _is_done(self, found: T) -> bool:
        """Whether a wait has come to its end."""
        return found.outcome == "Complete"

    def _to_send(self, given: Given) -> tuple[Cluster, dict[str, Any]]:
        """The manifest to send, and the cluster with its namespace: that of the object, or else of the client."""
        manifest = manifest_of(given, self._stored.resource)
        cluster = self._cluster.in_namespace(manifest["metadata"].get("namespace") or self._cluster.namespace)
        return cluster, {**manifest, "metadata": {**manifest["metadata"], "namespace": cluster.namespace}}


class Jobs(Objects[StoredJob]):
    """The FinetuneJobs."""

    def wait_until_suspended(self, name: str, *, timeout: float | None = None, pause: Pause = time.sleep) -> None:
        """Wait until all pods of a suspended job are gone.

        Raises:
            UsageError: The job was resumed or deleted in the meantime.
            TimedOutError: The time is over.
        """
        wait_until_suspended(self._cluster, name, self._notify, Poller(timeout, pause=pause))

    def wait_until_training(self, name: str, *, timeout: float | None = None, pause: Pause = time.sleep) -> None:
        """Wait until a job makes steps, or is complete.

        Raises:
            JobError: The job failed or is stalled.
            UsageError: The job was suspended or deleted in the meantime.
            TimedOutError: The time is over.
        """
        wait_until_training(self._cluster, name, self._notify, Poller(timeout, pause=pause))

    def logs(
        self, name: str, *, follow: bool = False, lines: int | None = None, pause: Pause = time.sleep
    ) -> Iterator[str]:
        """Yield log lines of all attempts, oldest first.

        Without a head pod, a temporary pod reads them from the job's volume or bucket.

        Args:
            name: Name of the job.
            follow: Go on with new lines until the job has ended; every line comes once.
            lines: Number of last lines; None: all.
            pause: Sleeps for the given seconds; may raise to end the iteration.

        Raises:
            UsageError: The job does not exist, or has not started yet.
        """
        if follow:
            return followed_lines(self._cluster, name, lines, self._notify, pause=pause)
        return log_lines(self._cluster, name, lines, self._notify)

    def report(self, name: str) -> str:
        """The HTML page of ``spotune report``, which a temporary pod renders on the job's volume.

        Raises:
            UsageError: The job does not exist, or has not started yet.
        """
        return report_page(self._cluster, name, self._notify)

    def fleet(self, *, everywhere: bool = False, by: By = "team", label: str = TEAM_LABEL) -> Fleet:
        """GPU hours, cost, goodput and waste by team, of the namespace or of all namespaces.

        Args:
            everywhere: Count the jobs of all namespaces.
            by: ``team``: the value of the label, or without it the namespace. ``namespace``: the namespace alone.
            label: The label.
        """
        return fleet_of((job.raw for job in self.list(everywhere=everywhere)), by, label)


class Sweeps(Objects[StoredSweep]):
    """The FinetuneSweeps."""

    def report(self, name: str, *, now: Callable[[], float] = time.time) -> str:
        """The HTML page of ``spotune sweep --report``."""
        return page(self.get(name).raw, now())


class Services(Objects[StoredService]):
    """The ModelServices."""

    def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        lines: int | None = None,
        component: Literal["", "gateway", "replicas", "head"] = "",
        since: float | None = None,
        pause: Pause = time.sleep,
    ) -> Iterator[str]:
        """Yield what the pods have printed, each line with the name of its pod.

        Args:
            name: Name of the service.
            follow: Go on with new lines, without an end.
            lines: Number of last lines; None: all.
            component: Which pods; empty: gateway and replicas.
            since: Maximum age of the lines in seconds; None: all.
            pause: Called between two looks for new pods; may raise to end the iteration.
        """
        selection = LogSelection(name, component, lines, since)
        if follow:
            return followed_service_lines(self._cluster, selection, self._notify, POLL_SECONDS, pause)
        return service_log_lines(self._cluster, selection, self._notify)

    def _is_done(self, found: StoredService) -> bool:
        return found.is_current and found.is_true("Ready")


class Client:
    """A client of a cluster; a context manager, and safe to share between threads.

    Args:
        namespace: Namespace of the objects; empty: that of the kubeconfig's context, or of the pod.
        kubeconfig: File to read instead of ``$KUBECONFIG`` and ``~/.kube/config``. Without any, and in a pod, the
            pod's service account is used.
        context: Context of the kubeconfig; empty: the current one.
        notify: Called with messages about connections that broke, and temporary pods that start.

    Raises:
        UsageError: There is no kubeconfig, or it does not contain the context.
        KubernetesError: The kubeconfig's credential plugin fails.
    """

    def __init__(
        self,
        namespace: str = "",
        *,
        kubeconfig: str | Path | None = None,
        context: str = "",
        notify: Notify = _silent,
    ) -> None:
        file = Path(kubeconfig) if kubeconfig is not None else None
        self._cluster = open_cluster(ClusterOptions(namespace, file, context))
        self.jobs = Jobs(self._cluster, StoredJob, notify)
        """The FinetuneJobs."""
        self.sweeps = Sweeps(self._cluster, StoredSweep, notify)
        """The FinetuneSweeps."""
        self.services = Services(self._cluster, StoredService, notify)
        """The ModelServices."""

    @property
    def namespace(self) -> str:
        """Namespace of the objects."""
        return self._cluster.namespace

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections."""
        self._cluster.close()
