"""The reconciler of ModelServices against an API server in a dictionary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from aiohttp import web

from spotune_operator.errors import RefusedError
from spotune_operator.kube.client import HTTP_ROUTES, SERVICE_CHILDREN, Kube, Resource
from spotune_operator.observe.caches import CachedJob, Caches
from spotune_operator.observe.nodes import NodeView
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.serving.caches import CachedService, ServiceCaches
from spotune_operator.serving.gateway_poller import GatewayPoller
from spotune_operator.serving.reconciler import ServiceReconciler
from spotune_operator.serving.scaling import RayClusterView, WorkerGroup
from spotune_operator.serving.state import ServiceChild, ServicePod, service_child_view
from spotune_operator.settings import Settings
from tests.operator.serving.scenario import NOW, a_service

KEY = ("team", "answers")
SETTINGS = Settings(serve_image="spotune/serve:1", start_poll_seconds=0.01)


@dataclass
class FakeKube:
    """Records the requests, and refuses kinds with a message.

    Attributes:
        applied: Kinds in the order of their applies.
        refuses: Message by kind.
        statuses: Patches of the status.
        deleted: Deleted kinds.
        forced: Grace periods of forced deletions, by the name of the pod.
        clusters: uids of deleted RayClusters by name.
        events: Reasons of Events.
        patches: JSON patches by name of the RayCluster.
    """

    applied: list[str] = field(default_factory=list)
    refuses: dict[str, str] = field(default_factory=dict)
    statuses: list[Mapping[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    forced: dict[str, int | None] = field(default_factory=dict)
    clusters: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    patches: dict[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    version: int = 10

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        kind = manifest["kind"]
        self.applied.append(kind)
        if kind in self.refuses:
            raise RefusedError(self.refuses[kind], 422)
        self.version += 1
        metadata = {**manifest["metadata"], "uid": f"uid-{kind}", "resourceVersion": str(self.version)}
        found = {**manifest, "metadata": metadata}
        self.objects[kind, metadata["name"]] = found
        return found

    async def patch(
        self, resource: Resource, namespace: str, name: str, changes: dict[str, Any], subresource: str
    ) -> dict[str, Any]:
        assert (resource.kind, namespace, name, subresource) == ("ModelService", *KEY, "status")
        assert changes["metadata"]["resourceVersion"] == self.body["metadata"]["resourceVersion"]
        self.statuses.append(changes["status"])
        self.version += 1
        metadata = {**self.body["metadata"], "resourceVersion": str(self.version)}
        self.body = {**self.body, "metadata": metadata, "status": self.body.get("status", {}) | changes["status"]}
        return self.body

    async def json_patch(
        self, resource: Resource, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> None:
        self.patches[name] = operations

    async def create(self, resource: Resource, manifest: dict[str, Any]) -> bool:
        self.events.append(manifest["reason"])
        return True

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        if resource.kind == "Pod":
            self.forced[name] = grace_seconds
        elif resource.kind == "RayCluster":
            self.clusters[name] = uid
        else:
            self.deleted.append(resource.kind)


@dataclass
class FakeCaches:
    """The caches of services: what the fake API server has."""

    kube: FakeKube
    pods_: list[ServicePod] = field(default_factory=list)
    clusters_: list[RayClusterView] = field(default_factory=list)

    def service(self, key: tuple[str, str]) -> CachedService | None:
        return CachedService.of(self.kube.body) if self.kube.body else None

    def put_written(self, raw: Mapping[str, Any]) -> None:
        assert raw == self.kube.body

    def children(self, service: CachedService) -> dict[tuple[str, str], ServiceChild]:
        return {key: service_child_view(found, key[0]) for key, found in self.kube.objects.items()}

    def pods(self, key: tuple[str, str]) -> list[ServicePod]:
        return self.pods_

    def clusters(self, key: tuple[str, str]) -> list[RayClusterView]:
        return self.clusters_

    def version_of(self, key: tuple[str, str], kind: str) -> int:
        return self.kube.version


@dataclass
class FakeJobs:
    """The cache of FinetuneJobs: one that is trained. `exported` is the step of its export, if it is reported."""

    task: str = "causal"
    exported: int | None = None

    def job(self, key: tuple[str, str]) -> CachedJob | None:
        metadata = {"namespace": "team", "name": "sql", "uid": "j", "resourceVersion": "1", "generation": 1}
        status: dict[str, Any] = {
            "output": "pvc://spotune-sql/team/sql-0123abcd/export",
            "step": 9,
            "phase": "Complete",
        }
        if self.exported is not None:
            status["trained"] = {"epochs": 3, "step": self.exported}
        body = {"metadata": metadata, "spec": {"model": {"task": self.task}}, "status": status}
        return CachedJob.of(body) if key == ("team", "sql") else None

    def provider_ids(self) -> list[str]:
        return []

    def node(self, name: str) -> NodeView | None:
        return NodeView(name, ready=False) if name == "dead" else None


@dataclass
class Bench:
    """A reconciler with its fakes."""

    kube: FakeKube = field(default_factory=FakeKube)
    jobs: FakeJobs = field(default_factory=FakeJobs)
    poller: GatewayPoller = field(default_factory=lambda: GatewayPoller(SETTINGS, lambda _: None))
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        service = a_service().model_dump(mode="json", by_alias=True, exclude_unset=True)
        metadata = {"namespace": "team", "name": "answers", "uid": "s", "resourceVersion": "1", "generation": 1}
        self.kube.body = {**service, "metadata": metadata}
        self.caches = FakeCaches(self.kube)
        self.reconciler = ServiceReconciler(
            cast("Kube", self.kube),
            cast("ServiceCaches", self.caches),
            cast("Caches", self.jobs),
            self.poller,
            SETTINGS,
            self.metrics,
            lambda: NOW,
        )

    def counted(self, result: str) -> float | None:
        return self.metrics.registry.get_sample_value("spotune_operator_reconciles_total", {"result": result})

    def reconcile(self) -> float | None:
        return asyncio.run(self.reconciler.reconcile(KEY))

    def condition(self, name: str) -> Mapping[str, Any]:
        (found,) = [each for each in self.kube.body["status"]["conditions"] if each["type"] == name]
        return cast("Mapping[str, Any]", found)


class WithoutRoutes:
    """An API server without objects, which forbids to list HTTPRoutes."""

    async def pages(self, resource: Resource, namespace: str, labels: str) -> AsyncIterator[tuple[list[Any], str]]:
        if resource is HTTP_ROUTES:
            raise RefusedError("you may not list httproutes", 403)
        yield [], "1"

    async def watch(
        self, resource: Resource, namespace: str, labels: str, version: str, seconds: int
    ) -> AsyncIterator[tuple[str, Any]]:
        await asyncio.Event().wait()
        yield "BOOKMARK", {}


async def fill_caches_without_routes() -> dict[str, bool]:
    """Whether each kind is listed when the caches are filled."""
    caches = ServiceCaches(cast("Kube", WithoutRoutes()), SETTINGS, lambda _: None)
    tasks = [asyncio.create_task(reflector.run()) for reflector in caches.reflectors()]
    await asyncio.wait_for(caches.synced(), 60)
    for task in tasks:
        task.cancel()
    return {reflector.resource.kind: reflector.synced.is_set() for reflector in caches.reflectors()}


def test_services_are_reconciled_without_the_right_to_list_http_routes() -> None:
    listed = asyncio.run(fill_caches_without_routes())
    assert [kind for kind, is_listed in listed.items() if not is_listed] == ["HTTPRoute"]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_children_are_applied_once_with_policies_before_pods(bench: Bench) -> None:
    bench.reconcile()
    assert bench.kube.applied.index("NetworkPolicy") < bench.kube.applied.index("RayService")
    assert set(bench.kube.applied) <= SERVICE_CHILDREN.keys()
    bench.kube.applied.clear()
    bench.reconcile()
    assert bench.kube.applied == []


def test_status_is_written_only_when_it_changes(bench: Bench) -> None:
    bench.reconcile()
    bench.reconcile()
    assert (bench.counted("ok"), bench.counted("stalled")) == (2, None)
    written = len(bench.kube.statuses)
    bench.reconcile()
    assert len(bench.kube.statuses) == written


def test_refused_child_is_reported_and_applied_again(bench: Bench) -> None:
    bench.kube.refuses["Service"] = "the name is taken"
    assert bench.reconcile() == 0.0
    assert bench.reconcile() == SETTINGS.rejected_retry_seconds
    assert bench.condition("Stalled")["message"] == "the API server rejected the Service: the name is taken"
    assert "Refused" in bench.kube.events
    del bench.kube.refuses["Service"]
    bench.kube.applied.clear()
    assert bench.reconcile() == 0.0
    assert bench.kube.applied == ["Service"]
    bench.reconcile()
    assert bench.condition("Stalled")["status"] == "False"


def test_a_refusal_whose_message_differs_each_time_is_tried_again_later(bench: Bench) -> None:
    bench.kube.refuses["Service"] = "request 1 timed out"
    assert bench.reconcile() == 0.0
    bench.kube.refuses["Service"] = "request 2 timed out"
    assert bench.reconcile() == SETTINGS.rejected_retry_seconds
    bench.kube.refuses["Service"] = "request 3 timed out"
    assert bench.reconcile() == SETTINGS.rejected_retry_seconds
    assert bench.condition("Stalled")["message"].endswith("request 2 timed out")


@pytest.mark.parametrize(("exported", "step"), [(None, 9), (6, 6)])
def test_the_version_has_the_step_of_the_exported_weights(exported: int | None, step: int, bench: Bench) -> None:
    """The best checkpoint may be older than the last step."""
    bench.jobs.exported = exported
    bench.reconcile()
    assert bench.kube.body["status"]["pendingModel"]["version"] == f"sql-0123abcd-step-{step}"


def test_invalid_spec_is_reported_and_tried_again(bench: Bench) -> None:
    bench.kube.body["spec"]["replicas"] = {"min": 3, "max": 1}
    assert bench.reconcile() == SETTINGS.rejected_retry_seconds
    assert "replicas" in bench.condition("Stalled")["message"]
    assert bench.kube.applied == []
    assert (bench.counted("stalled"), bench.counted("ok")) == (1, None)


def test_fields_of_a_newer_definition_are_ignored_until_somebody_changes_the_service(bench: Bench) -> None:
    bench.reconcile()
    bench.reconcile()  # with its children
    status = deepcopy(bench.kube.body["status"])
    bench.kube.body["spec"]["gateway"] = {"warp": "auto"}
    bench.reconcile()
    assert bench.kube.body["status"] == status
    bench.kube.body["metadata"]["generation"] = 2
    bench.reconcile()
    bench.reconcile()  # it has observed this generation now
    assert "spec.gateway.warp" in bench.condition("Stalled")["message"]


@pytest.mark.parametrize(("task", "image"), [("causal", "spotune/serve-vllm"), ("seq2seq", "spotune/serve")])
def test_the_task_of_the_job_decides_whether_gpus_need_vllm(task: str, image: str, bench: Bench) -> None:
    bench.jobs.task = task
    bench.kube.body["spec"]["gpus"] = 1
    bench.reconcile()
    assert bench.kube.body["status"]["image"].partition(":")[0] == image
    assert bench.kube.body["status"]["pendingModel"]["task"] == task


def test_suspended_service_loses_its_ray_service(bench: Bench) -> None:
    bench.reconcile()
    bench.kube.body["spec"]["suspend"] = True
    bench.reconcile()
    assert bench.kube.deleted == ["RayService"]


def test_running_cluster_is_resized(bench: Bench) -> None:
    groups = [WorkerGroup("gateway", 1, 1, 1), WorkerGroup("spot", 5, 5, 5)]
    bench.caches.clusters_ = [RayClusterView("team", "spotunems-answers-aaaaa", "answers", groups)]
    bench.reconcile()
    assert list(bench.kube.patches) == ["spotunems-answers-aaaaa"]


def test_the_cluster_of_a_spec_that_was_corrected_is_deleted_before_anything_was_served(bench: Bench) -> None:
    bench.reconcile()
    key, service = next((key, found) for key, found in bench.kube.objects.items() if key[0] == "RayService")
    bench.kube.objects[key] = {**service, "status": {"pendingServiceStatus": {"rayClusterName": "new"}}}
    bench.caches.clusters_ = [
        RayClusterView("team", name, "answers", uid=f"uid-{name}", owner="uid-RayService") for name in ("old", "new")
    ]
    bench.reconcile()
    assert bench.kube.clusters == {"old": "uid-old"}


@pytest.mark.parametrize("replicas", [{"min": 1}, {"min": 3, "max": 1}], ids=["valid", "invalid"])
def test_a_pod_that_ends_on_a_dead_node_is_deleted_by_force(replicas: dict[str, int], bench: Bench) -> None:
    bench.reconcile()
    bench.kube.body["spec"]["replicas"] = replicas
    lost = ServicePod("replica", "team", "answers", "replicas", uid="p", node="dead", deleting_since=NOW - 60)
    bench.caches.pods_ = [replace(lost, grace_seconds=30)]
    bench.reconcile()
    assert bench.kube.forced == {"replica": 0}


async def report_states(states: dict[str, int], check: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a check beside a gateway that reports these states of replicas, which the check may change."""

    async def stats(_request: web.Request) -> web.Response:
        return web.json_response({"process": "a", "versions": {}, "replicas": {"model-1": states}})

    application = web.Application()
    application.router.add_get("/stats", stats)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with GatewayPoller(SETTINGS, lambda _: None, port=runner.addresses[0][1]) as poller:
            await check(Bench(poller=poller))
    finally:
        await runner.cleanup()


def test_replica_of_a_restarted_pod_is_ready_again_once_its_gateway_says_so() -> None:
    gateway = ServicePod("g", "team", "answers", "gateway", "c", uid="g", address="127.0.0.1", ready=True)
    replica = ServicePod("r", "team", "answers", "replicas", "c", uid="r", ready=True, ready_since="10:00")
    states = {"RUNNING": 1}

    async def until_ready(bench: Bench) -> None:
        async with asyncio.timeout(30):
            while bench.kube.body["status"]["readyReplicas"] != 1:
                await bench.reconciler.reconcile(KEY)
                await asyncio.sleep(0.01)

    async def check(bench: Bench) -> None:
        await bench.reconciler.reconcile(KEY)
        key, service = next((key, found) for key, found in bench.kube.objects.items() if key[0] == "RayService")
        bench.kube.objects[key] = {**service, "status": {"activeServiceStatus": {"rayClusterName": "c"}}}
        bench.caches.pods_ = [gateway, replica]
        await bench.reconciler.reconcile(KEY)
        assert bench.condition("Ready")["status"] == "False", "no gateway has answered yet"
        await until_ready(bench)
        assert bench.condition("Ready")["status"] == "True"
        bench.caches.pods_ = [gateway, replace(replica, ready=False, ready_since="10:05")]
        await bench.reconciler.reconcile(KEY)
        assert bench.condition("Ready")["status"] == "False"
        states.clear()
        states["STARTING"] = 1
        bench.caches.pods_ = [gateway, replace(replica, ready_since="10:06")]
        for _ in range(5):
            await bench.reconciler.reconcile(KEY)
            assert bench.condition("Ready")["status"] == "False", "it loads its model"
            await asyncio.sleep(0.01)
        states["RUNNING"] = states.pop("STARTING")
        await until_ready(bench)
        assert bench.condition("Ready")["status"] == "True"

    asyncio.run(report_states(states, check))


def test_deleted_service_is_forgotten(bench: Bench) -> None:
    bench.reconcile()
    bench.kube.body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    bench.kube.applied.clear()
    assert bench.reconcile() is None
    assert bench.kube.applied == []
