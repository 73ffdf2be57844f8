"""AKS, GKE, EKS and none: how spot and GPU nodes look, how long a notice is, and which volumes pods can share.

Sources, by the titles of the clouds' own pages:

- labels and taints of spot nodes: AKS "Add an Azure Spot node pool"; GKE "Run fault-tolerant workloads on Spot VMs";
  EKS "Managed node groups" (capacity types); Karpenter "Well-known labels".
- taints of GPU nodes: AKS "Use GPUs for compute-intensive workloads" (``sku=gpu``); GKE "Run GPUs in GKE Standard node
  pools" (``nvidia.com/gpu=present``); the README of NVIDIA's device plugin (``nvidia.com/gpu``).
- notices: Azure "Scheduled Events" (Preempt, at least 30 s); GKE "Spot VMs", graceful termination (30 s, best effort,
  of which the kubelet keeps 15 s for system pods); EC2 "Spot Instance interruption notices" (120 s).
- volumes: AKS "Use Azure Files with CSI" (NFS needs ``protocol: nfs`` and a premium account); GKE "Access Filestore
  instances"; EKS "Store an elastic file system with Amazon EFS".
- workload identity: AKS "Use Microsoft Entra Workload ID" (the label is its webhook's; the other two need none).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from spotune_operator.errors import ProviderError, StorageClassError

GPU_RESOURCE = "nvidia.com/gpu"
"""Name of the resource that NVIDIA's device plugin offers, everywhere."""

Capacity = Literal["spot", "on-demand"]
"""Kind of a node."""

_SMB = (
    "Azure Files over SMB: no exclusive mkdir, no rename over an open file and no owners, which checkpoints rely on. "
    "Use a class with provisioner file.csi.azure.com and parameters.protocol nfs, such as azurefile-csi-nfs"
)
_ONE_NODE = "a disk that one node mounts at a time: head and workers need ReadWriteMany"
_DISKS = frozenset({"disk.csi.azure.com", "pd.csi.storage.gke.io", "ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com"})
_AZURE_FILES = "file.csi.azure.com"
_STORAGE_FIELD = "spec.storage.storageClassName"


class ProviderName(StrEnum):
    """Whose cloud the nodes are from, as ``spec.cluster.provider`` names it."""

    AKS = "aks"
    GKE = "gke"
    EKS = "eks"
    NONE = "none"


@dataclass(frozen=True)
class Label:
    """A label of nodes, with the value that spot nodes have."""

    key: str
    value: str


@dataclass(frozen=True)
class Taint:
    """A taint that a provider, or its documentation, sets on nodes; an empty value stands for any."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    def toleration(self) -> dict[str, str]:
        """The ``v1.Toleration`` for it."""
        if not self.value:
            return {"key": self.key, "operator": "Exists", "effect": self.effect}
        return {"key": self.key, "operator": "Equal", "value": self.value, "effect": self.effect}


@dataclass(frozen=True)
class Provider:
    """One row of the table.

    Attributes:
        name: Of the provider.
        provider_id_prefix: How ``spec.providerID`` of its nodes begins; empty for none.
        spot_labels: Any of them makes a node a spot node.
        spot_taints: What spot nodes are tainted with.
        gpu_taints: What GPU nodes are tainted with.
        notice_seconds: From the notice to the end of the machine.
        grace_seconds: Of these, what the kubelet leaves to pods like ours.
        storage_class: With ReadWriteMany volumes, taken when a job names none; empty: the cluster's default class.
        unfit_storage_classes: Classes that every cluster of the provider has, and why they are refused.
        device_plugin_labels: Labels of the device plugin's pods, any of which marks one, most likely first.
        workload_identity_labels: Labels of pods that use a service account's cloud identity.
    """

    name: ProviderName
    provider_id_prefix: str = ""
    spot_labels: tuple[Label, ...] = ()
    spot_taints: tuple[Taint, ...] = ()
    gpu_taints: tuple[Taint, ...] = (Taint(GPU_RESOURCE),)
    notice_seconds: int = 30
    grace_seconds: int = 30
    storage_class: str = ""
    unfit_storage_classes: Mapping[str, str] = field(default_factory=dict)
    device_plugin_labels: tuple[Label, ...] = (
        Label("name", "nvidia-device-plugin-ds"),
        Label("app.kubernetes.io/name", "nvidia-device-plugin"),
        Label("app", "nvidia-device-plugin-daemonset"),
    )
    workload_identity_labels: Mapping[str, str] = field(default_factory=dict)

    def is_home_of(self, provider_id: str) -> bool:
        """Whether a node with this ``spec.providerID`` is one of the provider's."""
        return bool(self.provider_id_prefix) and provider_id.startswith(self.provider_id_prefix)

    def node_selector_terms(self, capacity: Capacity) -> list[dict[str, Any]]:
        """``nodeSelectorTerms``, one of which a node has to meet; none where spot and on-demand look the same."""
        if capacity == "spot":
            return [{"matchExpressions": [_expression(label, "In")]} for label in self.spot_labels]
        not_spot = [_expression(label, "NotIn") for label in self.spot_labels]
        return [{"matchExpressions": not_spot}] if not_spot else []

    def tolerations(self, capacity: Capacity, *, gpus: bool) -> list[dict[str, str]]:
        """``v1.Toleration``s for the taints of the nodes that pods shall run on."""
        spot = self.spot_taints if capacity == "spot" else ()
        return [taint.toleration() for taint in (*spot, *(self.gpu_taints if gpus else ()))]


def _expression(label: Label, operator: Literal["In", "NotIn"]) -> dict[str, Any]:
    return {"key": label.key, "operator": operator, "values": [label.value]}


AKS = Provider(
    name=ProviderName.AKS,
    provider_id_prefix="azure://",
    spot_labels=(Label("kubernetes.azure.com/scalesetpriority", "spot"),),
    spot_taints=(Taint("kubernetes.azure.com/scalesetpriority", "spot"),),
    gpu_taints=(Taint(GPU_RESOURCE), Taint("sku", "gpu")),
    storage_class="azurefile-csi-nfs",
    unfit_storage_classes={
        **dict.fromkeys(("azurefile", "azurefile-csi", "azurefile-premium", "azurefile-csi-premium"), _SMB),
        **dict.fromkeys(("default", "managed", "managed-csi", "managed-premium", "managed-csi-premium"), _ONE_NODE),
    },
    workload_identity_labels={"azure.workload.identity/use": "true"},
)
GKE = Provider(
    name=ProviderName.GKE,
    provider_id_prefix="gce://",
    spot_labels=(Label("cloud.google.com/gke-spot", "true"),),
    spot_taints=(Taint("cloud.google.com/gke-spot", "true"),),
    grace_seconds=15,
    storage_class="standard-rwx",
    unfit_storage_classes=dict.fromkeys(("standard", "standard-rwo", "premium-rwo"), _ONE_NODE),
    device_plugin_labels=(Label("k8s-app", "nvidia-gpu-device-plugin"),),
)
EKS = Provider(
    name=ProviderName.EKS,
    provider_id_prefix="aws://",
    spot_labels=(Label("eks.amazonaws.com/capacityType", "SPOT"), Label("karpenter.sh/capacity-type", "spot")),
    notice_seconds=120,
    grace_seconds=120,
    storage_class="efs-sc",
    unfit_storage_classes=dict.fromkeys(("gp2", "gp3", "auto-ebs-sc"), _ONE_NODE),
)
NONE = Provider(name=ProviderName.NONE)

PROVIDERS: Mapping[ProviderName, Provider] = {provider.name: provider for provider in (AKS, GKE, EKS, NONE)}


def detect(provider_ids: Iterable[str]) -> Provider:
    """The provider of a cluster, from ``spec.providerID`` of its nodes; NONE where no node is from a known cloud.

    Raises:
        ProviderError: The nodes are from more than one cloud.
    """
    ids = tuple(provider_ids)
    clouds = [provider for provider in (AKS, GKE, EKS) if any(map(provider.is_home_of, ids))]
    if len(clouds) > 1:
        names = " and ".join(cloud.name for cloud in clouds)
        raise ProviderError("spec.cluster.provider", f"is auto, and the nodes are from {names}: name one of them")
    return clouds[0] if clouds else NONE


def refuse_unfit_class_name(provider: Provider, name: str) -> None:
    """Refuse a class by its name alone, before a cluster is asked.

    Raises:
        StorageClassError: Every cluster of the provider has a class of this name, and it does not do.
    """
    if reason := provider.unfit_storage_classes.get(name):
        raise StorageClassError(_STORAGE_FIELD, f"{name} is {reason}")


def refuse_unfit_class(storage_class: Mapping[str, Any]) -> None:
    """Refuse a class that cannot give ReadWriteMany volumes fit for checkpoints.

    Args:
        storage_class: A ``storage.k8s.io/v1`` StorageClass as the API server has it.

    Raises:
        StorageClassError: Its provisioner gives SMB shares, or disks for one node.
    """
    name, provisioner = storage_class["metadata"]["name"], storage_class["provisioner"]
    protocol = (storage_class.get("parameters") or {}).get("protocol", "smb")
    if provisioner == _AZURE_FILES and protocol.lower() != "nfs":
        raise StorageClassError(_STORAGE_FIELD, f"{name} is {_SMB}")
    if provisioner in _DISKS:
        raise StorageClassError(_STORAGE_FIELD, f"{name} ({provisioner}) is {_ONE_NODE}")
