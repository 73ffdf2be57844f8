"""The worker group of each pool: where its pods may run, and what Ray and Kueue are told."""

from __future__ import annotations

from typing import Any

from spotune_operator.children.raycluster import Replicas, ray_cluster
from spotune_operator.providers import EKS, GKE, Provider
from tests.operator.support.resolved_jobs import resolved_job_of

L4 = {"name": "l4-a", "capacity": "spot", "zone": "a", "gpuType": "nvidia-l4", "nodeSelector": {"team": "x"}}
ANY = {"name": "any", "capacity": "on-demand"}


def groups(provider: Provider, *pools: dict[str, Any], **workers: Any) -> dict[str, Any]:
    """The worker groups by name."""
    resolved = resolved_job_of(provider, workers={"count": 2, "pools": list(pools), **workers})
    cluster = ray_cluster(resolved, Replicas(0, pools={pools[0]["name"]: 2}, leaving={"any": ["any-1"]}))
    return {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}


def terms(group: dict[str, Any]) -> list[dict[str, tuple[str, list[str]]]]:
    """The alternatives of labels that a node has."""
    affinity = group["template"]["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [
        {each["key"]: (each["operator"], each["values"]) for each in term["matchExpressions"]}
        for term in affinity["nodeSelectorTerms"]
    ]


def test_a_pool_selects_its_nodes_and_tolerates_their_taints() -> None:
    found = groups(GKE, L4, ANY)
    spot = ("In", ["true"])
    assert terms(found["l4-a"]) == [
        {"cloud.google.com/gke-spot": spot, "cloud.google.com/gke-accelerator": ("In", ["nvidia-l4"])}
    ]
    assert terms(found["any"]) == [{"cloud.google.com/gke-spot": ("NotIn", ["true"])}]
    selector = found["l4-a"]["template"]["spec"]["nodeSelector"]
    assert selector == {"team": "x", "topology.kubernetes.io/zone": "a"}
    assert "nodeSelector" not in found["any"]["template"]["spec"]
    tolerated = {each.get("key") for each in found["l4-a"]["template"]["spec"]["tolerations"]}
    assert {"cloud.google.com/gke-spot", "nvidia.com/gpu"} <= tolerated
    assert (found["l4-a"]["replicas"], found["any"]["replicas"]) == (2, 0)
    assert found["any"]["scaleStrategy"] == {"workersToDelete": ["any-1"]}
    assert "scaleStrategy" not in found["l4-a"]


def test_any_of_the_labels_of_a_provider_is_enough() -> None:
    keys = [sorted(term) for term in terms(groups(EKS, L4)["l4-a"])]
    assert len(keys) == 4
    assert ["eks.amazonaws.com/capacityType", "karpenter.k8s.aws/instance-gpu-name"] in keys
    assert ["eks.amazonaws.com/instance-gpu-name", "karpenter.sh/capacity-type"] in keys


def test_ray_knows_the_type_of_gpu_unless_types_may_mix() -> None:
    found = groups(GKE, L4, ANY)
    assert found["l4-a"]["rayStartParams"]["resources"] == "'{\"spotune-gpu-type:nvidia-l4\":1}'"
    assert "resources" not in found["any"]["rayStartParams"]
    assert "resources" not in groups(GKE, L4, mixGpuTypes=True)["l4-a"]["rayStartParams"]
