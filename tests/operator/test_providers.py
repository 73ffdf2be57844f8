"""The providers, against nodes and storage classes as the clouds create them."""

from typing import Any

import pytest

from spotune_operator.errors import ProviderError, StorageClassError
from spotune_operator.providers import (
    AKS,
    EKS,
    GKE,
    NONE,
    PROVIDERS,
    Capacity,
    Provider,
    ProviderName,
    detect,
    refuse_unfit_class,
    refuse_unfit_class_name,
)
from spotune_testcluster import providers as clouds

CLOUDS = (AKS, GKE, EKS)
KARPENTER_SPOT = {"karpenter.sh/capacity-type": "spot"}


def fits(provider: Provider, capacity: Capacity, labels: dict[str, str]) -> bool:
    """Whether a pod can be scheduled on a node with these labels."""

    def meets(expression: dict[str, Any]) -> bool:
        found = labels.get(expression["key"]) in expression["values"]
        return found if expression["operator"] == "In" else not found

    terms = provider.node_selector_terms(capacity)
    return not terms or any(all(map(meets, term["matchExpressions"])) for term in terms)


def tolerated(taint: dict[str, str], tolerations: list[dict[str, str]]) -> bool:
    def matches(toleration: dict[str, str]) -> bool:
        same = toleration["key"] == taint["key"] and toleration["effect"] == taint["effect"]
        return same and (toleration["operator"] == "Exists" or toleration["value"] == taint.get("value"))

    return any(map(matches, tolerations))


def node_labels(provider: Provider, capacity: Capacity) -> dict[str, str]:
    return clouds.labels(clouds.Provider(provider.name), clouds.Capacity(capacity), 1)


@pytest.mark.parametrize("provider", CLOUDS, ids=lambda provider: provider.name)
def test_spot_and_on_demand_pods_run_on_their_own_nodes_only(provider: Provider) -> None:
    for wanted in ("spot", "on-demand"):
        for there in ("spot", "on-demand"):
            assert fits(provider, wanted, node_labels(provider, there)) == (wanted == there)


def test_karpenter_nodes_are_recognized() -> None:
    assert fits(EKS, "spot", KARPENTER_SPOT)
    assert not fits(EKS, "on-demand", KARPENTER_SPOT)
    assert fits(EKS, "on-demand", {"karpenter.sh/capacity-type": "on-demand"})


def test_any_node_matches_without_a_provider() -> None:
    assert fits(NONE, "spot", {})
    assert fits(NONE, "on-demand", {})


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
@pytest.mark.parametrize("gpus", [0, 1])
def test_taints_that_a_provider_sets_are_tolerated(provider: Provider, gpus: int) -> None:
    taints = clouds.taints(clouds.Provider(provider.name), clouds.Capacity.SPOT, gpus)
    tolerations = provider.tolerations("spot", gpus=gpus > 0)
    assert [taint for taint in taints if not tolerated(taint, tolerations)] == []


def test_pods_without_gpus_stay_away_from_gpu_nodes() -> None:
    assert AKS.tolerations("on-demand", gpus=False) == []


def test_provider_is_detected_from_its_nodes() -> None:
    for provider in PROVIDERS.values():
        name = clouds.Provider(provider.name)
        assert detect([clouds.provider_id(name, "n1", "zone"), ""]) is provider
    assert detect([]) is NONE
    assert detect(["kind://docker/kind/kind-control-plane"]) is NONE


def test_nodes_of_two_clouds_are_refused_with_the_field_that_decides() -> None:
    with pytest.raises(ProviderError, match=r"spec\.cluster\.provider: is auto, but the nodes are from aks and eks"):
        detect(["aws:///eu-west-1a/i-1", "azure:///subscriptions/0"])


def test_grace_period_ends_before_the_machine_does() -> None:
    for provider in PROVIDERS.values():
        assert 0 < provider.grace_seconds <= provider.notice_seconds


def test_every_provider_name_has_a_provider() -> None:
    assert {name: provider.name for name, provider in PROVIDERS.items()} == {name: name for name in ProviderName}


@pytest.mark.parametrize("provider", CLOUDS, ids=lambda provider: provider.name)
def test_default_class_is_not_a_refused_one(provider: Provider) -> None:
    assert provider.storage_class
    refuse_unfit_class_name(provider, provider.storage_class)


def test_smb_class_is_refused_with_reason_and_alternative() -> None:
    with pytest.raises(StorageClassError) as refused:
        refuse_unfit_class_name(AKS, "azurefile-csi")
    assert refused.value.field == "spec.storage.storageClassName"
    assert "SMB, which lacks exclusive mkdir" in str(refused.value)
    assert "azurefile-csi-nfs" in str(refused.value)


def storage_class(provisioner: str, **parameters: str) -> dict[str, Any]:
    found: dict[str, Any] = {"metadata": {"name": "mine"}, "provisioner": provisioner}
    return found | ({"parameters": parameters} if parameters else {})


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (storage_class("file.csi.azure.com"), "SMB"),
        (storage_class("file.csi.azure.com", protocol="smb"), "SMB"),
        (storage_class("disk.csi.azure.com"), "ReadWriteMany"),
        (storage_class("pd.csi.storage.gke.io"), "ReadWriteMany"),
        (storage_class("ebs.csi.aws.com"), "ReadWriteMany"),
    ],
)
def test_classes_that_cannot_hold_checkpoints_are_refused(found: dict[str, Any], reason: str) -> None:
    with pytest.raises(StorageClassError, match=f"mine .*{reason}"):
        refuse_unfit_class(found)


@pytest.mark.parametrize(
    "found",
    [
        storage_class("file.csi.azure.com", protocol="nfs"),
        storage_class("filestore.csi.storage.gke.io", tier="standard"),
        storage_class("efs.csi.aws.com"),
        storage_class("nfs.csi.k8s.io"),
    ],
    ids=lambda found: found["provisioner"],
)
def test_classes_with_shared_volumes_pass(found: dict[str, Any]) -> None:
    refuse_unfit_class(found)
