"""`spotune doctor` names pools that no node matches."""

from __future__ import annotations

from typing import Any

from spotune_operator.cli.doctor.check import Forbidden, Verdict
from spotune_operator.cli.doctor.pools import pools
from spotune_operator.observe.nodes import NodeView
from spotune_operator.providers import GKE
from tests.operator.support.scenarios import a_cluster_job

NODE = NodeView("n", labels={"cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-spot": "true"})


def _job(**workers: Any) -> dict[str, Any]:
    found = a_cluster_job(cluster={"provider": "auto"}, workers=workers)
    return {**found.model_dump(mode="json", by_alias=True, exclude_unset=True), "status": {"phase": "New"}}


def test_pools_that_no_node_matches_are_a_warning() -> None:
    job = _job(pools=[{"name": "l4", "gpuType": "nvidia-l4"}, {"name": "typo", "gpuType": "nvidia-l5"}])
    found = pools([job], [NODE], GKE)
    assert found is not None
    assert found.verdict is Verdict.WARNING, "an autoscaler may create such a node"
    assert "typo (spot, cloud.google.com/gke-accelerator=nvidia-l5)" in found.message
    assert "l4 (" not in found.message.replace("nvidia-l4", "")
    assert pools([_job(pools=[{"name": "l4", "gpuType": "nvidia-l4"}])], [NODE], GKE).verdict is Verdict.PASSED  # type: ignore[union-attr]


def test_jobs_without_pools_need_no_check() -> None:
    assert pools([_job(count=2), {"spec": "broken"}], [NODE], GKE) is None
    hidden = pools([_job(pools=[{"name": "a"}])], Forbidden("no rights"), GKE)
    assert hidden is not None
    assert "no rights" in hidden.message
