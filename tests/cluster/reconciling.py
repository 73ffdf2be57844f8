"""Passes over one job in this process, on a real API server, with pods that do not run and a scripted supervisor.

Everything is real except for parts that need nodes: no scheduler handles the pods, and an HTTP server replaces the
supervisor. KubeRay must not run meanwhile. Tests set the clock, so that two lives of a job can be compared.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from spotune.units.timestamps import rfc3339
from spotune_operator.children.config import JOB_FILE
from spotune_operator.children.resolved_job import JOB_LABEL
from spotune_operator.errors import KubernetesError
from spotune_operator.kube.client import (
    CHILDREN,
    CONFIG_MAPS,
    EVENTS,
    FINETUNE_JOBS,
    PODS,
    RAY_CLUSTERS,
    Kube,
    Login,
    Manifest,
    Resource,
)
from spotune_operator.observe.caches import Caches
from spotune_operator.observe.state import GROUP_LABEL, child_view, pod_view
from spotune_operator.observe.supervisor_poller import Poller
from spotune_operator.observe.supervisor_status import parse_progress
from spotune_operator.reconcile.reconciler import Reconciler
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.settings import Settings
from tests.operator.support.local_server import LocalServer, local_server

NAME = "job"
STORAGE_CLASS = "of-nobody"
START = 1_800_000_000.0
_SETTINGS = Settings(image="registry.example/trainer:1", poll_seconds=0.05, start_poll_seconds=0.05)
_MOST_PASSES = 60
_OF_THE_SERVER = ("uid", "creationTimestamp", "resourceVersion", "managedFields")
_COUNTED = tuple(CHILDREN.values())

T = TypeVar("T")


Kind = Literal["crash", "lost", "cut"]


class Crashed(Exception):  # noqa: N818 - an operator that is gone is no error of anything
    """The operator's process crashes at this point."""


@dataclass
class Fault:
    """A fault of a write request. Requests are counted from 1 over all operators of a life.

    Attributes:
        at: Number of the request; 0: none.
        kind: The operator crashes after the request, its response is lost, or the request never arrives.
        every: In addition, each request whose number is a multiple of this; 0: none.
        log: Verb and kind of all requests so far.
    """

    at: int = 0
    kind: Kind = "crash"
    every: int = 0
    log: list[str] = field(default_factory=list)

    async def befall(self, words: str, request: Coroutine[Any, Any, T]) -> T:
        """Send a request, with the fault if its number is that of the fault."""
        self.log.append(words)
        is_the_one = len(self.log) == self.at or (self.every > 0 and len(self.log) % self.every == 0)
        if is_the_one and self.kind == "cut":
            request.close()
            raise KubernetesError("the API server cannot be reached (a test has cut the line)")
        found = await request
        if is_the_one and self.kind == "lost":
            raise KubernetesError("the API server cannot be reached (a test has eaten the answer)")
        if is_the_one:
            raise Crashed(words)
        return found


class FaultyKube(Kube):
    """A client with a fault in its write requests."""

    def __init__(self, login: Login, fault: Fault) -> None:
        super().__init__(login)
        self._fault = fault

    async def apply(self, manifest: Manifest) -> Manifest:
        return await self._fault.befall(f"apply {manifest['kind']}", super().apply(manifest))

    async def patch(
        self, resource: Resource, namespace: str, name: str, changes: Manifest, subresource: str = ""
    ) -> Manifest:
        request = super().patch(resource, namespace, name, changes, subresource)
        return await self._fault.befall(f"patch {resource.kind} {subresource}", request)

    async def create(self, resource: Resource, manifest: Manifest) -> bool:
        return await self._fault.befall(f"create {resource.kind}", super().create(resource, manifest))

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        uid: str,
        grace_seconds: int | None = None,
        version: str = "",
    ) -> None:
        request = super().delete(resource, namespace, name, uid, grace_seconds, version)
        return await self._fault.befall(f"delete {resource.kind}", request)


@dataclass
class Operator:
    """A running reconciler with its caches."""

    kube: Kube
    caches: Caches
    poller: Poller
    reconciler: Reconciler

    async def look(self, key: tuple[str, str]) -> float | None:
        """Run one pass over the current job."""
        async for jobs, _ in self.kube.pages(FINETUNE_JOBS, key[0], ""):
            for body in jobs:
                self.caches.put_job(body)
        return await self.reconciler.reconcile(key)

    async def catch_up(self, key: tuple[str, str], answer: Mapping[str, Any]) -> None:
        """Wait until the caches match the API server, and the poller has the supervisor's response."""
        async with asyncio.timeout(20):
            while not await self._is_up_to_date(key, answer):  # noqa: ASYNC110 - a watch does not report completion
                await asyncio.sleep(0.02)

    async def _is_up_to_date(self, key: tuple[str, str], answer: Mapping[str, Any]) -> bool:
        there = {
            kind.kind: child_view(found, kind.kind)
            for kind in _COUNTED
            for found in await listed(self.kube, kind, key[0])
        }
        pods = sorted((pod_view(pod) for pod in await listed(self.kube, PODS, key[0])), key=lambda pod: pod.name)
        if there != self.caches.children(key) or pods != self.caches.pods(key):
            return False
        head = next((pod for pod in pods if pod.component == "head" and pod.runs), None)
        poll = self.poller.set_target(key, head.ip if head is not None else "")
        return poll is None or poll.response == parse_progress(answer)


async def listed(kube: Kube, resource: Resource, namespace: str) -> list[Manifest]:
    """All objects of a kind that belong to the job; none if the kind is not installed."""
    labels = "" if resource in (FINETUNE_JOBS, EVENTS) else JOB_LABEL
    try:
        return [item async for items, _ in kube.pages(resource, namespace, labels) for item in items]
    except KubernetesError as error:
        if error.status == 404:  # a kind that is not installed
            return []
        raise


@dataclass
class World:
    """A namespace with one job, its operator, and everything around them.

    Attributes:
        kube: A client with the rights of the administrator.
        namespace: The namespace of the job.
        login: The credentials of the operators.
        server: The HTTP server of the supervisor.
        fault: The fault of the operator's requests.
        now: The time of the operator's clock.
        answer: The supervisor's response to `/progress`.
        is_silent: Whether the supervisor responds with an error instead.
    """

    kube: Kube
    namespace: str
    login: Login
    server: LocalServer
    fault: Fault = field(default_factory=Fault)
    now: float = START
    answer: dict[str, Any] = field(default_factory=dict)
    is_silent: bool = False
    crashes: int = 0
    _running: Operator | None = None
    _heard: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name of the job."""
        return self.namespace, NAME

    # The operator

    async def settle(self) -> None:
        """Run passes until there is nothing left to do. A crashed operator is replaced by a new one."""
        is_up_to_date = False
        for _ in range(_MOST_PASSES):
            operator = self._running or await self._start()
            before, self._heard = len(self.fault.log), False
            try:
                again = await operator.look(self.key)
                if is_up_to_date and len(self.fault.log) == before and again != 0.0 and not self._heard:
                    return
            except Crashed:
                self.crashes += 1
                is_up_to_date = False
                await self.stop()
                continue
            except KubernetesError:
                self.crashes += 1
            await operator.catch_up(self.key, self.answer)
            is_up_to_date = True
        raise AssertionError(f"after {_MOST_PASSES} passes there is still something to do: {self.fault.log[-20:]}")

    async def _start(self) -> Operator:
        kube = FaultyKube(self.login, self.fault)
        await kube.__aenter__()
        settings = Settings(**{**_SETTINGS.__dict__, "watch_namespaces": self.namespace})
        port = urlsplit(self.server.url).port or 0
        poller = Poller(settings, self._hear, lambda: self.now, port)
        await poller.__aenter__()
        caches = Caches(kube, settings, lambda _: None, lambda _: None)
        reconciler = Reconciler(kube, caches, poller, settings, Metrics(), lambda: self.now)
        self._tasks = [asyncio.create_task(reflector.run()) for reflector in caches.reflectors()]
        await caches.synced()
        self._running = Operator(kube, caches, poller, reconciler)
        return self._running

    def _hear(self, _key: tuple[str, str]) -> None:
        """The poller got a changed response of the supervisor, for example after `POST /stop`."""
        self._heard = True

    async def stop(self) -> None:
        """Stop the operator."""
        if self._running is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._running.poller.__aexit__(None, None, None)
        await self._running.kube.__aexit__(None, None, None)
        self._running = None

    # Actions of the user

    async def create_job(self, name: str = NAME, **sections: Any) -> None:
        """Create a job; sections of its spec may be replaced."""
        spec = {
            "model": {"source": "model", "task": "seq2seq"},
            "dataset": {"train": {"source": "shards"}},
            "training": {"maxSteps": 100},
            "workers": {"count": 2, "gpus": 0},
            "cluster": {"provider": "none"},
            "storage": {"storageClassName": STORAGE_CLASS, "size": "1Gi"},
        } | sections
        metadata = {"name": name, "namespace": self.namespace}
        kind = {"apiVersion": FINETUNE_JOBS.group_version, "kind": FINETUNE_JOBS.kind}
        body = {**kind, "metadata": metadata, "spec": spec}
        assert await self.kube.create(FINETUNE_JOBS, body)

    async def edit_job(self, **sections: Any) -> None:
        """Merge a change into the job's spec."""
        await self.kube.patch(FINETUNE_JOBS, *self.key, {"spec": sections})

    # Actions of KubeRay, the kubelet and the supervisor

    async def run_pods(self, workers: int) -> None:
        """Create the missing pods from the RayCluster's templates, and set all of them to running."""
        (cluster,) = await listed(self.kube, RAY_CLUSTERS, self.namespace)
        spec = cluster["spec"]
        await self._run_pod("head", spec["headGroupSpec"]["template"], "headgroup")
        for number in range(workers):
            group = spec["workerGroupSpecs"][0]
            await self._run_pod(f"worker-{number}", group["template"], group["groupName"])

    async def _run_pod(self, name: str, template: Manifest, group: str) -> None:
        metadata = template["metadata"]
        labels = metadata["labels"] | {GROUP_LABEL: group}
        containers = [{"name": "c", "image": "registry.example/none:1"}]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels}
            | {"annotations": metadata.get("annotations", {})},
            "spec": {"schedulerName": "nobody", "containers": containers, "automountServiceAccountToken": False},
        }
        await self.kube.create(PODS, pod)
        started = {"running": {"startedAt": rfc3339(self.now)}}
        container = {"name": "c", "image": "x", "imageID": "x", "ready": True, "restartCount": 0, "state": started}
        conditions = [{"type": "Ready", "status": "True"}]
        ip = str(urlsplit(self.server.url).hostname)
        status: Manifest = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
        status |= {"containerStatuses": [container], "conditions": conditions}
        await self.kube.patch(PODS, self.namespace, name, {"status": status}, "status")

    async def end_pods(self) -> None:
        """Delete all pods."""
        for pod in await listed(self.kube, PODS, self.namespace):
            metadata = pod["metadata"]
            await self.kube.delete(PODS, self.namespace, metadata["name"], metadata["uid"], grace_seconds=0)

    async def supervisor_says(self, phase: str, state: str, *, passed: bool = True, **content: Any) -> None:
        """Set the supervisor's responses from now on, with the hash of the job file in the ConfigMap."""
        (config,) = await listed(self.kube, CONFIG_MAPS, self.namespace)
        job = hashlib.sha256(config["data"][JOB_FILE].encode()).hexdigest()
        supervisor = {"job": job, "state": state, "message": "", "preflight": {"passed": passed, "checks": []}}
        self.answer = {"phase": phase, "supervisor": supervisor, **content}

    async def set_silent(self, silent: bool) -> None:
        """Let the supervisor respond with errors only, or not any more, and wait until the operator has heard it."""
        assert self._running is not None
        self.is_silent, poller, ip = silent, self._running.poller, str(urlsplit(self.server.url).hostname)
        async with asyncio.timeout(20):
            while (poll := poller.set_target(self.key, ip)) is None or bool(poll.error) != silent:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def supervise(self, request: web.Request) -> web.StreamResponse:
        """Respond as a supervisor that stops immediately after `POST /stop`."""
        if self.is_silent:
            raise web.HTTPServiceUnavailable
        if request.method == "POST":
            state = {"/stop": "stopped", "/start": "running"}[request.path]
            self.answer = {**self.answer, "supervisor": {**self.answer["supervisor"], "state": state}}
            return web.json_response(self.answer["supervisor"])
        return web.json_response(self.answer)

    # The final state

    async def picture(self) -> dict[str, Any]:
        """All objects of the job, without values that differ between lives: uids, the server's times and versions."""
        (job,) = await listed(self.kube, FINETUNE_JOBS, self.namespace)
        found: dict[str, Any] = {"status": job.get("status")}
        for kind in _COUNTED:
            found[kind.kind] = [_without_chance(child) for child in await listed(self.kube, kind, self.namespace)]
        events = await listed(self.kube, EVENTS, self.namespace)
        ours = [event for event in events if event["involvedObject"]["kind"] == FINETUNE_JOBS.kind]
        found["events"] = Counter((event["type"], event["reason"], event["message"]) for event in ours)
        return found

    async def clear(self) -> None:
        """Delete everything that a life has created."""
        await self.stop()
        kinds = (FINETUNE_JOBS, *_COUNTED, PODS, EVENTS)
        async with asyncio.timeout(60):
            while found := [(kind, item) for kind in kinds for item in await listed(self.kube, kind, self.namespace)]:
                for kind, item in found:
                    metadata = item["metadata"]
                    await self.kube.delete(kind, self.namespace, metadata["name"], metadata["uid"], grace_seconds=0)
        self.now, self.answer, self.fault, self.crashes = START, {}, Fault(), 0


def _without_chance(child: Manifest) -> Manifest:
    metadata = {name: value for name, value in child["metadata"].items() if name not in _OF_THE_SERVER}
    owners = [{**owner, "uid": ""} for owner in metadata.pop("ownerReferences", ())]
    managers = sorted({entry["manager"] for entry in child["metadata"]["managedFields"]})
    return {**child, "metadata": {**metadata, "owners": owners, "managers": managers}}


@asynccontextmanager
async def world(login: Login, namespace: str, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[World]:
    """A world with a supervisor at an address. Its objects are deleted at the end of the block."""

    async def supervise(request: web.Request) -> web.StreamResponse:
        return await found.supervise(request)

    async with Kube(login) as kube, local_server(supervise, host=host, port=port) as server:
        found = World(kube, namespace, login, server)
        try:
            yield found
        finally:
            await found.clear()


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """The differences of two pictures, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys(), key=str):
            yield from differences(before.get(name), after.get(name), f"{place}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (left, right) in enumerate(zip(before, after, strict=True)):
            yield from differences(left, right, f"{place}[{index}]")
    elif before != after:
        yield f"{place}: {before!r} is now {after!r}"
