"""The asynchronous client: the methods of ``Client`` as coroutines and asynchronous iterators.

The Kubernetes library is synchronous, so each request runs in a thread of the event loop's default executor. A wait or
an iteration occupies one thread. When its task is cancelled, the thread ends at its next pause: at once between two
polls, after at most 5 s while it follows a log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from spotune.custom_resource.object_names import TEAM_LABEL
from spotune_client.client import Client, Jobs, Objects, Services, Sweeps, _silent
from spotune_client.cluster.volume_pod import Notify
from spotune_client.fleet.summary import By, Fleet
from spotune_client.objects import Given, Stored, StoredJob, StoredService, StoredSweep
from spotune_client.threads import call, iterate

T = TypeVar("T", bound=Stored[Any, Any])


class AsyncObjects(Generic[T]):
    """The objects of one kind; the methods are those of ``Objects``, with the same errors."""

    def __init__(self, objects: Objects[T]) -> None:
        self._objects = objects

    async def apply(self, given: Given, *, force: bool = False) -> T:
        """Create an object or change it, as ``kubectl apply --server-side``."""
        return await call(lambda _: self._objects.apply(given, force=force))

    async def create(self, given: Given) -> T:
        """Create an object."""
        return await call(lambda _: self._objects.create(given))

    async def get(self, name: str) -> T:
        """Get an object."""
        return await call(lambda _: self._objects.get(name))

    async def list(self, *, everywhere: bool = False) -> list[T]:
        """The objects of the namespace, or of all namespaces, sorted by namespace and name."""
        return await call(lambda _: self._objects.list(everywhere=everywhere))

    def watch(self, name: str) -> AsyncIterator[T]:
        """Yield an object now and whenever it has changed, until it has ended."""
        return iterate(lambda pause: self._objects.watch(name, pause=pause))

    async def wait(
        self,
        name: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the same argument as of Client
        progress: Callable[[T], None] | None = None,
        fail_if_stalled: bool = False,
    ) -> T:
        """Wait until a job or sweep is complete, or a service ready. ``progress`` is called in another thread."""
        wait = partial(self._objects.wait, name, timeout=timeout, progress=progress, fail_if_stalled=fail_if_stalled)
        return await call(lambda pause: wait(pause=pause))

    async def suspend(self, name: str) -> bool:
        """Suspend an object; returns whether it was not yet suspended."""
        return await call(lambda _: self._objects.suspend(name))

    async def resume(self, name: str) -> bool:
        """Resume an object; returns whether it was suspended."""
        return await call(lambda _: self._objects.resume(name))

    async def delete(
        self,
        name: str,
        *,
        wait: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109 - the same argument as of Client
    ) -> None:
        """Delete an object and its pods. A job's storage stays unless its ``storage.retain`` is false."""
        await call(lambda pause: self._objects.delete(name, wait=wait, timeout=timeout, pause=pause))


class AsyncJobs(AsyncObjects[StoredJob]):
    """The FinetuneJobs."""

    _objects: Jobs

    async def wait_until_suspended(
        self,
        name: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the same argument as of Client
    ) -> None:
        """Wait until all pods of a suspended job are gone."""
        await call(lambda pause: self._objects.wait_until_suspended(name, timeout=timeout, pause=pause))

    async def wait_until_training(
        self,
        name: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the same argument as of Client
    ) -> None:
        """Wait until a job makes steps, or is complete."""
        await call(lambda pause: self._objects.wait_until_training(name, timeout=timeout, pause=pause))

    def logs(self, name: str, *, follow: bool = False, lines: int | None = None) -> AsyncIterator[str]:
        """Yield log lines of all attempts, oldest first."""
        return iterate(lambda pause: self._objects.logs(name, follow=follow, lines=lines, pause=pause))

    async def report(self, name: str) -> str:
        """The HTML page of ``spotune report``."""
        return await call(lambda _: self._objects.report(name))

    async def fleet(self, *, everywhere: bool = False, by: By = "team", label: str = TEAM_LABEL) -> Fleet:
        """GPU hours, cost, goodput and waste by team, of the namespace or of all namespaces."""
        return await call(lambda _: self._objects.fleet(everywhere=everywhere, by=by, label=label))


class AsyncSweeps(AsyncObjects[StoredSweep]):
    """The FinetuneSweeps."""

    _objects: Sweeps

    async def report(self, name: str) -> str:
        """The HTML page of ``spotune sweep --report``."""
        return await call(lambda _: self._objects.report(name))


class AsyncServices(AsyncObjects[StoredService]):
    """The ModelServices."""

    _objects: Services

    def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        lines: int | None = None,
        component: Literal["", "gateway", "replicas", "head"] = "",
        since: float | None = None,
    ) -> AsyncIterator[str]:
        """Yield what the pods have printed, each line with the name of its pod."""
        read = partial(self._objects.logs, name, follow=follow, lines=lines, component=component, since=since)
        return iterate(lambda pause: read(pause=pause))


class AsyncClient:
    """A client of a cluster; an asynchronous context manager. Arguments as of ``Client``."""

    def __init__(
        self,
        namespace: str = "",
        *,
        kubeconfig: str | Path | None = None,
        context: str = "",
        notify: Notify = _silent,
    ) -> None:
        self._client = Client(namespace, kubeconfig=kubeconfig, context=context, notify=notify)
        self.jobs = AsyncJobs(self._client.jobs)
        """The FinetuneJobs."""
        self.sweeps = AsyncSweeps(self._client.sweeps)
        """The FinetuneSweeps."""
        self.services = AsyncServices(self._client.services)
        """The ModelServices."""

    @property
    def namespace(self) -> str:
        """Namespace of the objects."""
        return self._client.namespace

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
