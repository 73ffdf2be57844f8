"""Passes on a real API server: with faults at every request, with changed children, and with nothing to do."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from spotune_operator.children.ports import PROGRESS
from spotune_operator.kube.client import CHILDREN, FINETUNE_JOBS, RAY_CLUSTERS, Login, Manifest, Resource
from spotune_operator.main import login
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.cluster.definitions import apply_definitions
from tests.cluster.job_lives import LIFE, TRAINING, live
from tests.cluster.operator_install import no_operator
from tests.cluster.reconciling import NAME, STORAGE_CLASS, Fault, Kind, World, differences, listed, world
from tests.cluster.whole_operator import whole_operator
from tests.operator.support.event_loop import run

pytestmark = pytest.mark.cluster

EVERY = int(os.environ.get("SPOTUNE_TEST_FAULT_EVERY", "16"))
"""Every how many requests a fault is injected, for each kind of fault; 1: at every request."""
KINDS: tuple[Kind, ...] = ("crash", "lost", "cut")
MADE = ("PersistentVolumeClaim", "ConfigMap", "NetworkPolicy", "RayCluster")
"""Children of a job without a PodMonitor."""
QUIET_AFTER_SECONDS = 5.0
IDLE_SECONDS = 60.0


@pytest.fixture(scope="module", autouse=True)
def _without_kuberay(cluster: ClusterUnderTest) -> Iterator[None]:
    """The definition, a storage class without a provisioner, no KubeRay (it would create pods), no other operator."""
    machine = cluster.machine_for("stopping KubeRay")
    apply_definitions(cluster.kubectl)
    cluster.kubectl.apply(_class_of_nobody(STORAGE_CLASS))
    machine.component("stop", "kuberay-operator")
    try:
        with no_operator(cluster):
            yield
    finally:
        machine.component("start", "kuberay-operator")
        cluster.kubectl("delete", "storageclass", STORAGE_CLASS)


def _class_of_nobody(name: str) -> Manifest:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": "example.org/nobody",
    }


@pytest.fixture
def credentials(cluster: ClusterUnderTest, monkeypatch: pytest.MonkeyPatch) -> Login:
    """The credentials of the administrator, in the place where the operator finds its own."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubectl.kubeconfig))
    return login


def within(namespace: Kubectl, credentials: Login, test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with world(credentials, namespace.namespace) as here:
            await test(here)

    run(main())


# Faults of requests


def test_a_job_is_what_it_was_whatever_befalls_any_request(
    namespace: Kubectl, credentials: Login, took: dict[str, float]
) -> None:
    """The operator crashes after the request, its response is lost, or it never arrives. The job does not change."""

    async def test(here: World) -> None:
        undisturbed = await live(here)
        requests = len(here.fault.log)
        start = time.monotonic()
        chosen = [
            (at, kind)
            for at in range(1, requests + 1)
            for number, kind in enumerate(KINDS)
            if (at + number * 2) % EVERY == 0
        ]
        for at, kind in chosen:
            await here.clear()
            here.fault = Fault(at, kind)
            pictures = await live(here)
            assert here.crashes == 1, f"{kind} at {at} has not happened"
            when = f"{kind} at {at} ({here.fault.log[at - 1]})"
            for stage, before, after in zip(LIFE, undisturbed, pictures, strict=True):
                assert list(differences(before, after)) == [], f"{when}, seen when the job {stage.__name__}"
        took[f"{len(chosen)} lives with a fault at one of {requests} requests"] = time.monotonic() - start

    within(namespace, credentials, test)


def test_a_job_is_what_it_was_when_operators_crash_again_and_again(namespace: Kubectl, credentials: Login) -> None:
    async def test(here: World) -> None:
        undisturbed = await live(here)
        await here.clear()
        here.fault = Fault(every=7)  # each operator applies the four children once, and then makes some progress
        assert list(differences(undisturbed, await live(here))) == []
        assert here.crashes >= 8

    within(namespace, credentials, test)


def test_a_life_takes_few_requests(namespace: Kubectl, credentials: Login) -> None:
    """Each stage applies only its changes, creates each Event once, and writes the status at most three times."""

    async def test(here: World) -> None:
        for stage in LIFE:
            before = len(here.fault.log)
            await live(here, (stage,))
            done = Counter(here.fault.log[before:])
            assert done["patch FinetuneJob status"] <= 3, (stage.__name__, done)
            assert all(done[f"apply {kind}"] <= 2 for kind in CHILDREN), (stage.__name__, done)
        before = len(here.fault.log)
        await here.settle()
        assert here.fault.log[before:] == []

    within(namespace, credentials, test)


def test_an_operator_that_starts_anew_applies_children_once_and_says_nothing(
    namespace: Kubectl, credentials: Login
) -> None:
    async def test(here: World) -> None:
        (*_, before) = await live(here, TRAINING)
        await here.stop()
        requests = len(here.fault.log)
        await here.settle()
        assert here.fault.log[requests:] == [f"apply {kind}" for kind in MADE]
        assert await here.picture() == before

    within(namespace, credentials, test)


# Children changed by others


def _change(path: str, value: Any) -> Manifest:
    """A merge patch of one field; spaces separate the parts of the path."""
    change: Any = value
    for name in reversed(path.split()):
        change = {name: change}
    assert isinstance(change, dict)
    return change


DRIFT = [
    ("PersistentVolumeClaim", "metadata labels spotune.dev/job", None),
    ("PersistentVolumeClaim", "metadata labels app.kubernetes.io/component", "other"),
    ("ConfigMap", "data job.yaml", "spec: {}"),
    ("ConfigMap", "metadata ownerReferences", None),
    ("ConfigMap", "metadata labels spotune.dev/job", "other"),
    ("NetworkPolicy", "spec ingress", None),
    ("NetworkPolicy", "spec podSelector matchLabels", {"app": "other"}),
    ("RayCluster", "spec headGroupSpec template spec containers", [{"name": "ray-head", "image": "other"}]),
    ("RayCluster", "spec workerGroupSpecs", []),
    ("RayCluster", "spec enableInTreeAutoscaling", True),
    ("RayCluster", "metadata labels spotune.dev/job", None),
]


def test_every_child_that_is_changed_is_repaired(namespace: Kubectl, credentials: Login) -> None:
    async def test(here: World) -> None:
        (*_, before) = await live(here, TRAINING)
        for kind, path, value in DRIFT:
            await here.kube.patch(CHILDREN[kind], here.namespace, f"spotune-{NAME}", _change(path, value))
            await here.settle()
            after = await here.picture()
            change = f"{path} of the {kind} was {value}"
            assert list(differences(_repaired(before), _repaired(after))) == [], change

    within(namespace, credentials, test)


async def _end_of(here: World, kind: Resource, deleted: Manifest) -> None:
    """Wait until a deleted object is gone: a claim is Terminating until Kubernetes has removed its finalizer."""

    async def uids() -> list[str]:
        return [each["metadata"]["uid"] for each in await listed(here.kube, kind, here.namespace)]

    async with asyncio.timeout(20):
        while deleted["metadata"]["uid"] in await uids():  # noqa: ASYNC110 - no watch runs in the test
            await asyncio.sleep(0.02)


def test_every_child_that_is_deleted_is_made_again(namespace: Kubectl, credentials: Login) -> None:
    async def test(here: World) -> None:
        (*_, before) = await live(here, TRAINING)
        for kind in MADE:
            (child,) = await listed(here.kube, CHILDREN[kind], here.namespace)
            await here.kube.delete(CHILDREN[kind], here.namespace, f"spotune-{NAME}", child["metadata"]["uid"])
            await _end_of(here, CHILDREN[kind], child)
            await here.settle()
            (again,) = await listed(here.kube, CHILDREN[kind], here.namespace)
            assert again["metadata"]["uid"] != child["metadata"]["uid"]
        assert list(differences(_repaired(before), _repaired(await here.picture()))) == []

    within(namespace, credentials, test)


def test_cluster_that_somebody_suspends_comes_back_when_its_pods_are_gone(
    namespace: Kubectl, credentials: Login
) -> None:
    async def test(here: World) -> None:
        (*_, before) = await live(here, TRAINING)
        await here.kube.patch(RAY_CLUSTERS, here.namespace, f"spotune-{NAME}", {"spec": {"suspend": True}})
        await here.settle()
        (cluster,) = await listed(here.kube, RAY_CLUSTERS, here.namespace)
        assert cluster["spec"]["suspend"] is True, "KubeRay ends all pods before it makes new ones"
        await here.end_pods()
        await here.settle()
        await here.run_pods(workers=2)
        await here.settle()
        after = await here.picture()
        assert list(differences(_repaired(before["RayCluster"]), _repaired(after["RayCluster"]))) == []
        assert after["status"]["phase"] == "Training"

    within(namespace, credentials, test)


def test_what_belongs_to_others_is_left_alone(namespace: Kubectl, credentials: Login) -> None:
    theirs = {"labels": {"team": "nlp"}, "annotations": {"example.org/note": "keep"}}

    async def test(here: World) -> None:
        await live(here, TRAINING)
        for kind in MADE:
            more = {"data": {"notes": "theirs"}} if kind == "ConfigMap" else {}
            await here.kube.patch(CHILDREN[kind], here.namespace, f"spotune-{NAME}", {"metadata": theirs} | more)
        await here.settle()
        await here.stop()
        await here.settle()
        for kind in MADE:
            (child,) = await listed(here.kube, CHILDREN[kind], here.namespace)
            assert child["metadata"]["labels"]["team"] == "nlp"
            assert child["metadata"]["annotations"]["example.org/note"] == "keep"
            if kind == "ConfigMap":
                assert child["data"]["notes"] == "theirs"

    within(namespace, credentials, test)


def test_suspension_of_a_job_in_a_queue_belongs_to_kueue(namespace: Kubectl, credentials: Login) -> None:
    async def test(here: World) -> None:
        await here.create_job(cluster={"provider": "none", "queueName": "queue"})
        await here.settle()
        for suspend in (True, False):
            await here.kube.patch(RAY_CLUSTERS, here.namespace, f"spotune-{NAME}", {"spec": {"suspend": suspend}})
            await here.settle()
            (cluster,) = await listed(here.kube, RAY_CLUSTERS, here.namespace)
            assert cluster["spec"]["suspend"] is suspend

    within(namespace, credentials, test)


def test_claim_of_a_job_that_names_no_class_is_applied_again_and_again(
    cluster: ClusterUnderTest, namespace: Kubectl, credentials: Login
) -> None:
    """The operator has to apply the provider's default class each time: it cannot be changed or removed later."""
    cluster.kubectl.apply(_class_of_nobody("standard-rwx"))

    async def test(here: World) -> None:
        await here.create_job(cluster={"provider": "gke"}, storage={"size": "1Gi"})
        await here.settle()
        await here.stop()
        await here.settle()
        (claim,) = await listed(here.kube, CHILDREN["PersistentVolumeClaim"], here.namespace)
        assert claim["spec"]["storageClassName"] == "standard-rwx"
        conditions = {each["type"]: each for each in (await here.picture())["status"]["conditions"]}
        assert conditions["Stalled"]["status"] == "False", conditions["Stalled"]

    try:
        within(namespace, credentials, test)
    finally:
        cluster.kubectl("delete", "storageclass", "standard-rwx")


def test_status_that_somebody_has_spoilt_is_written_again(namespace: Kubectl, credentials: Login) -> None:
    async def test(here: World) -> None:
        (*_, before) = await live(here, TRAINING)
        spoilt: list[dict[str, Any]] = [
            {"conditions": []},
            {"phase": "Complete", "step": 99},
            {"workers": None, "eta": None},
        ]
        for change in spoilt:
            await here.kube.patch(FINETUNE_JOBS, *here.key, {"status": change}, "status")
            await here.settle()
            after = (await here.picture())["status"]
            for name in change:
                assert _without_times(after[name]) == _without_times(before["status"][name])

    within(namespace, credentials, test)


def test_a_later_step_of_another_operator_stays_until_the_next_poll(namespace: Kubectl, credentials: Login) -> None:
    async def test(here: World) -> None:
        await live(here, TRAINING)
        await here.set_silent(True)
        here.now += 1
        await here.kube.patch(FINETUNE_JOBS, *here.key, {"status": {"step": 99}}, "status")
        await here.settle()
        assert (await here.picture())["status"]["step"] == 99
        await here.set_silent(False)
        await here.settle()
        assert (await here.picture())["status"]["step"] == 10

    within(namespace, credentials, test)


def _repaired(found: Any) -> Any:
    """A part of a picture without values that every repair changes: generations, managers, transition times."""
    if isinstance(found, dict):
        left_out = ("generation", "managers", "lastTransitionTime")
        return {name: _repaired(value) for name, value in found.items() if name not in left_out}
    return [_repaired(item) for item in found] if isinstance(found, list) else found


def _without_times(found: Any) -> Any:
    if not isinstance(found, list):
        return found
    return [{name: value for name, value in item.items() if name != "lastTransitionTime"} for item in found]


# Nothing to do


@pytest.mark.long
def test_nothing_is_asked_and_nothing_is_written_while_nothing_changes(
    cluster: ClusterUnderTest, namespace: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole operator, as in its pod, with jobs that wait, are stalled, suspended or in training."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubectl.kubeconfig))

    async def main() -> None:
        async with world(login, namespace.namespace, "127.0.0.77", PROGRESS.number) as here:
            await live(here, TRAINING)
            await here.stop()
            for name, change in OTHERS.items():
                await here.create_job(name, **change)
            async with whole_operator(here.namespace) as operator:
                await _has_said_something(here)
                await asyncio.sleep(QUIET_AFTER_SECONDS)
                calls, versions = await operator.calls(), await _versions(here)
                await asyncio.sleep(IDLE_SECONDS)
                assert await operator.calls() - calls == Counter()
                assert await _versions(here) == versions

    run(main())


OTHERS: dict[str, dict[str, Any]] = {
    "waits": {},
    "stalled": {"storage": {"storageClassName": "nothere"}},
    "suspended": {"suspend": True},
    "elsewhere": {"model": {"source": "~/models/t5"}},
}


async def _has_said_something(here: World) -> None:
    """Wait until every job has a status."""
    async with asyncio.timeout(60):
        while True:
            jobs = await listed(here.kube, FINETUNE_JOBS, here.namespace)
            if all((job.get("status") or {}).get("observedGeneration") == 1 for job in jobs):
                return
            await asyncio.sleep(0.2)


async def _versions(here: World) -> dict[str, str]:
    """The resource version of each object that the operator writes, by uid."""
    kinds = [FINETUNE_JOBS, *CHILDREN.values()]
    found = [item for kind in kinds for item in await listed(here.kube, kind, here.namespace)]
    return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in found}
