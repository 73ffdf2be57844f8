"""Decisions about the claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune_operator.observe.state import Child, Observed
from tests.operator.support.scenarios import Life, a_cluster_job


def claim_of(life: Life) -> dict[str, Any]:
    """The spec of the claim that is wanted."""
    (found,) = [each for each in life.decide().apply if each["kind"] == "PersistentVolumeClaim"]
    return dict(found["spec"])


def a_claim(storage_class: str) -> dict[str, Child]:
    found = Child("PersistentVolumeClaim", "default", "spotune-job", "uid-c", "job", "1", storage_class=storage_class)
    return {"PersistentVolumeClaim": found}


def test_claim_of_a_cloud_keeps_the_class_that_it_was_made_with() -> None:
    life = Life(a_cluster_job(cluster={"provider": "aks"}, storage={"size": "10Gi"}), seen=Observed())
    first = claim_of(life)
    assert first["storageClassName"] == "azurefile-csi-nfs"
    life.see(children=a_claim("azurefile-csi-nfs"))
    assert claim_of(life) == first, "to leave the class out would take it away, which the API server refuses"


def test_class_that_another_version_would_take_does_not_change_a_claim() -> None:
    life = Life(a_cluster_job(cluster={"provider": "gke"}, storage={"size": "10Gi"}), seen=Observed())
    life.see(children=a_claim("an-earlier-one"))
    assert claim_of(life)["storageClassName"] == "an-earlier-one"


def test_class_that_the_api_server_has_filled_in_stays() -> None:
    life = Life(a_cluster_job(storage={"size": "10Gi"}), seen=Observed())
    assert "storageClassName" not in claim_of(life)
    life.see(children=a_claim("the-default-one"))
    assert claim_of(life)["storageClassName"] == "the-default-one"


@pytest.mark.parametrize("there", ["shared", "another"])
def test_class_that_the_job_asks_for_is_asked_for(there: str) -> None:
    """If the claim has another one, the API server says that it cannot be changed, and the status says so."""
    life = Life(a_cluster_job())
    life.see(children=a_claim(there))
    assert claim_of(life)["storageClassName"] == "shared"


def test_a_larger_size_is_asked_for() -> None:
    life = Life(a_cluster_job(cluster={"provider": "aks"}, storage={"size": "10Gi"}), seen=Observed())
    life.see(children={"PersistentVolumeClaim": replace(a_claim("x")["PersistentVolumeClaim"], capacity="10Gi")})
    life.edit(a_cluster_job(cluster={"provider": "aks"}, storage={"size": "20Gi"}))
    assert claim_of(life)["resources"] == {"requests": {"storage": "20Gi"}}
