"""A child of a service that cannot be applied keeps no others from their work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest

from spotune_operator.errors import KubernetesError
from spotune_operator.serving.scaling import RayClusterView, WorkerGroup
from tests.operator.serving.test_reconciler import Bench, FakeKube

INGRESS: Final = {"host": "answers.example.org"}


@dataclass
class WithoutWebhook(FakeKube):
    """An API server whose webhook of Ingresses does not answer, unless `answers`."""

    answers: bool = False

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if manifest["kind"] == "Ingress" and not self.answers:
            raise KubernetesError("the webhook does not answer", 500)
        return await super().apply(manifest)


@pytest.fixture
def bench() -> Bench:
    return Bench(WithoutWebhook())


@contextmanager
def failing() -> Iterator[None]:
    with pytest.raises(KubernetesError, match="the webhook does not answer"):
        yield


def test_the_cluster_is_resized(bench: Bench) -> None:
    groups = [WorkerGroup("gateway", 1, 1, 1), WorkerGroup("spot", 5, 5, 5)]
    bench.caches.clusters_ = [RayClusterView("team", "spotunems-answers-aaaaa", "answers", groups)]
    bench.kube.body["spec"]["ingress"] = INGRESS
    with failing():
        bench.reconcile()
    assert list(bench.kube.patches) == ["spotunems-answers-aaaaa"]


def test_the_ray_service_of_a_suspended_service_is_deleted(bench: Bench) -> None:
    bench.reconcile()
    bench.kube.body["spec"] |= {"ingress": INGRESS, "suspend": True}
    with failing():
        bench.reconcile()
    assert bench.kube.deleted == ["RayService"]


def test_another_child_stays_until_its_successor_is_applied(bench: Bench) -> None:
    bench.kube.body["spec"]["httpRoute"] = {"parentRefs": [{"name": "public"}], "hostnames": ["answers.example.org"]}
    bench.reconcile()
    del bench.kube.body["spec"]["httpRoute"]
    bench.kube.body["spec"]["ingress"] = INGRESS
    with failing():
        bench.reconcile()
    assert bench.kube.deleted == []
    assert isinstance(bench.kube, WithoutWebhook)
    bench.kube.answers = True
    bench.reconcile()
    assert bench.kube.deleted == ["HTTPRoute"]
