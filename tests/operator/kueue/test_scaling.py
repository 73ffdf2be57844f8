"""The patch that scales a RayCluster in a queue changes numbers of workers, and nothing that Kueue has written."""

from __future__ import annotations

from spotune_operator.children.raycluster import Replicas, ray_cluster
from spotune_operator.kueue.scaling import is_queued, scale_operations
from tests.operator.support.resolved_jobs import resolved_job_of

MIXED = {"count": 4, "capacity": "spot-then-on-demand"}


def test_groups_are_scaled_by_name() -> None:
    manifest = ray_cluster(resolved_job_of(cluster={"queueName": "team"}, workers=MIXED), Replicas(3, 1))
    assert is_queued(manifest)
    operations = scale_operations(manifest, [("theirs", 7), ("workers", 4), ("on-demand", 1)])
    assert operations == [
        {"op": "test", "path": "/spec/workerGroupSpecs/1/groupName", "value": "workers"},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/scaleStrategy", "value": {"workersToDelete": []}},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/maxReplicas", "value": 4},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/replicas", "value": 3},
    ]


def test_nothing_is_patched_if_the_numbers_are_right() -> None:
    manifest = ray_cluster(resolved_job_of(cluster={"queueName": "team"}, workers={"count": 2}), Replicas(2))
    assert scale_operations(manifest, [("workers", 2)]) == []
    manifest["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {"workersToDelete": ["pod-1"]}
    assert scale_operations(manifest, [("workers", 2)])[1]["value"] == {"workersToDelete": ["pod-1"]}


def test_other_clusters_and_kinds_are_applied() -> None:
    manifest = ray_cluster(resolved_job_of(workers={"count": 2}), Replicas(2))
    assert not is_queued(manifest)
    assert not is_queued(manifest | {"kind": "ConfigMap"})
