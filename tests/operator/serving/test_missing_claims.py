"""Services that name a claim: when it is looked up, and that they wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from spotune_operator.kube.client import Resource
from spotune_operator.serving.state import ServicePod
from tests.operator.serving.test_reconciler import SETTINGS, Bench, FakeKube


@dataclass
class KubeWithClaims(FakeKube):
    """Also looks up claims.

    Attributes:
        claims: Names of those that exist.
        lookups: Names of those that were looked up.
    """

    claims: list[str] = field(default_factory=list)
    lookups: list[str] = field(default_factory=list)

    async def find(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        assert (resource.kind, namespace) == ("PersistentVolumeClaim", "team")
        self.lookups.append(name)
        return {} if name in self.claims else None


@pytest.fixture
def kube() -> KubeWithClaims:
    return KubeWithClaims()


@pytest.fixture
def bench(kube: KubeWithClaims) -> Bench:
    """A service of a model on the claim ``models``."""
    made = Bench(kube)
    kube.body["spec"]["model"] = {"claim": {"name": "models", "path": "t5"}}
    return made


def test_a_service_waits_for_the_claims_that_it_names(bench: Bench, kube: KubeWithClaims) -> None:
    assert bench.reconcile() == SETTINGS.rejected_retry_seconds
    assert bench.condition("Stalled")["reason"] == "ClaimNotFound"
    assert kube.applied == []
    kube.claims = ["models"]
    kube.body["metadata"]["generation"] = 2
    bench.reconcile()
    assert (bench.condition("ModelAvailable")["status"], bench.condition("Stalled")["status"]) == ("True", "False")
    assert "RayService" in kube.applied
    bench.reconcile()
    assert kube.lookups == ["models", "models"]


def test_the_claims_of_a_service_that_runs_are_not_looked_up(bench: Bench, kube: KubeWithClaims) -> None:
    bench.caches.pods_ = [ServicePod("gateway", "team", "answers", "gateway", node="n1")]
    bench.reconcile()
    assert bench.condition("ModelAvailable")["status"] == "True"
    assert kube.lookups == []
