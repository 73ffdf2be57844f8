"""The cloud providers: labels and taints of spot and GPU nodes, notice before reclaim, and shared volumes.

Sources, by the titles of the clouds' own pages:

- labels and taints of spot nodes: AKS "Add an Azure Spot node pool"; GKE "Run fault-tolerant workloads on Spot VMs";
  EKS "Managed node groups" (capacity types); Karpenter "Well-known labels".
- taints of GPU nodes: AKS "Use GPUs for compute-intensive workloads" (``sku=gpu``); GKE "Run GPUs in GKE Standard node
  pools" (``nvidia.com/gpu=present``); the README of NVIDIA's device plugin (``nvidia.com/gpu``).
- types of GPUs: GKE "About GPUs" (``cloud.google.com/gke-accelerator``); Karpenter "Well-known labels" and EKS "Create
  node pools for Auto Mode" (``instance-gpu-name``); the README of NVIDIA's GPU feature discovery
  (``nvidia.com/gpu.product``), for clouds without a label of their own.
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
"""Resource name of NVIDIA's device plugin."""

Capacity = Literal["spot", "on-demand"]
"""Capacity type of a node."""

_SMB = (
    "Azure Files over SMB, which lacks exclusive mkdir, rename over an open file and owners: checkpoints need them. "
    "Use a class with provisioner file.csi.azure.com and parameters.protocol nfs, such as azurefile-csi-nfs"
)
_ONE_NODE = "a disk that only one node can mount: head and workers need ReadWriteMany"
_DISKS = frozenset({"disk.csi.azure.com", "pd.csi.storage.gke.io", "ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com"})
_AZURE_FILES = "file.csi.azure.com"
_STORAGE_FIELD = "spec.storage.storageClassName"


class ProviderName(StrEnum):
    """The cloud of the nodes, as in ``spec.cluster.provider``."""

    AKS = "aks"
    GKE = "gke"
    EKS = "eks"
    NONE = "none"


@dataclass(frozen=True)
class Label:
    """A label with its value."""

    key: str
    value: str


@dataclass(frozen=True)
class Taint:
    """A taint that a provider sets on nodes, or documents; an empty value matches any."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    def toleration(self) -> dict[str, str]:
        """The ``v1.Toleration`` for this taint."""
        if not self.value:
            return {"key": self.key, "operator": "Exists", "effect": self.effect}
        return {"key": self.key, "operator": "Equal", "value": self.value, "effect": self.effect}


@dataclass(frozen=True)
class Provider:
    """The properties of one provider.

    Attributes:
        name: Name of the provider.
        provider_id_prefix: Prefix of ``spec.providerID`` of its nodes; empty for none.
        spot_labels: Labels of spot nodes; one of them is enough.
        spot_taints: Taints of spot nodes.
        gpu_taints: Taints of GPU nodes.
        gpu_type_labels: Labels with the type of a node's GPUs; a node has one of them.
        notice_seconds: Seconds from the notice to the end of the machine.
        grace_seconds: Seconds of these that the kubelet leaves to pods that are not system pods.
        storage_class: Default class with ReadWriteMany volumes; empty: the cluster's default class.
        unfit_storage_classes: Classes that exist in every cluster of the provider, with the reason to refuse them.
        device_plugin_labels: Labels of the device plugin's pods, most likely first; one of them is enough.
        workload_identity_labels: Labels of pods that use the cloud identity of a service account.
    """

    name: ProviderName
    provider_id_prefix: str = ""
    spot_labels: tuple[Label, ...] = ()
    spot_taints: tuple[Taint, ...] = ()
    gpu_taints: tuple[Taint, ...] = (Taint(GPU_RESOURCE),)
    gpu_type_labels: tuple[str, ...] = ("nvidia.com/gpu.product",)
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

    def owns(self, provider_id: str) -> bool:
        """Whether a node with this ``spec.providerID`` belongs to the provider."""
        return bool(self.provider_id_prefix) and provider_id.startswith(self.provider_id_prefix)

    def node_selector_terms(self, capacity: Capacity, gpu_type: str = "") -> list[dict[str, Any]]:
        """``nodeSelectorTerms`` for a capacity type and a type of GPU; empty if no label is needed.

        Args:
            capacity: Capacity type; no term selects it if the provider has no labels of spot nodes.
            gpu_type: Value of one of `gpu_type_labels`; empty: any.
        """
        terms = self._capacity_terms(capacity)
        if not gpu_type:
            return terms
        return [
            {"matchExpressions": [*term["matchExpressions"], _expression(Label(key, gpu_type), "In")]}
            for key in self.gpu_type_labels
            for term in terms or [{"matchExpressions": []}]
        ]

    def _capacity_terms(self, capacity: Capacity) -> list[dict[str, Any]]:
        if capacity == "spot":
            return [{"matchExpressions": [_expression(label, "In")]} for label in self.spot_labels]
        not_spot = [_expression(label, "NotIn") for label in self.spot_labels]
        return [{"matchExpressions": not_spot}] if not_spot else []

    def has_capacity(self, labels: Mapping[str, str], capacity: Capacity) -> bool:
        """Whether a node with these labels has a capacity type; of a provider without labels of spot nodes: always."""
        if not self.spot_labels:
            return True
        return any(labels.get(label.key) == label.value for label in self.spot_labels) == (capacity == "spot")

    def tolerations(self, capacity: Capacity, *, gpus: bool) -> list[dict[str, str]]:
        """``v1.Toleration``s for the taints of nodes of a capacity type, with or without GPUs."""
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
    gpu_type_labels=("cloud.google.com/gke-accelerator",),
    grace_seconds=15,
    storage_class="standard-rwx",
    unfit_storage_classes=dict.fromkeys(("standard", "standard-rwo", "premium-rwo"), _ONE_NODE),
    device_plugin_labels=(Label("k8s-app", "nvidia-gpu-device-plugin"),),
)
EKS = Provider(
    name=ProviderName.EKS,
    provider_id_prefix="aws://",
    spot_labels=(Label("eks.amazonaws.com/capacityType", "SPOT"), Label("karpenter.sh/capacity-type", "spot")),
    gpu_type_labels=("karpenter.k8s.aws/instance-gpu-name", "eks.amazonaws.com/instance-gpu-name"),
    notice_seconds=120,
    grace_seconds=120,
    storage_class="efs-sc",
    unfit_storage_classes=dict.fromkeys(("gp2", "gp3", "auto-ebs-sc"), _ONE_NODE),
)
NONE = Provider(name=ProviderName.NONE)

PROVIDERS: Mapping[ProviderName, Provider] = {provider.name: provider for provider in (AKS, GKE, EKS, NONE)}


def detect(provider_ids: Iterable[str]) -> Provider:
    """The provider of a cluster, by ``spec.providerID`` of its nodes; NONE if no node is from a known cloud.

    Raises:
        ProviderError: The nodes are from more than one cloud.
    """
    ids = tuple(provider_ids)
    clouds = [provider for provider in (AKS, GKE, EKS) if any(map(provider.owns, ids))]
    if len(clouds) > 1:
        names = " and ".join(cloud.name for cloud in clouds)
        raise ProviderError("spec.cluster.provider", f"is auto, but the nodes are from {names}: name one of them")
    return clouds[0] if clouds else NONE


def refuse_unfit_class_name(provider: Provider, name: str) -> None:
    """Refuse an unfit storage class by its name alone, without a cluster.

    Raises:
        StorageClassError: The provider has a built-in class of this name, and it is unfit.
    """
    if reason := provider.unfit_storage_classes.get(name):
        raise StorageClassError(_STORAGE_FIELD, f"{name} is {reason}")


def refuse_unfit_class(storage_class: Mapping[str, Any]) -> None:
    """Refuse a storage class without ReadWriteMany volumes that are fit for checkpoints.

    Args:
        storage_class: A ``storage.k8s.io/v1`` StorageClass of the API server.

    Raises:
        StorageClassError: Its provisioner creates SMB shares, or disks for one node.
    """
    name, provisioner = storage_class["metadata"]["name"], storage_class["provisioner"]
    protocol = (storage_class.get("parameters") or {}).get("protocol", "smb")
    if provisioner == _AZURE_FILES and protocol.lower() != "nfs":
        raise StorageClassError(_STORAGE_FIELD, f"{name} is {_SMB}")
    if provisioner in _DISKS:
        raise StorageClassError(_STORAGE_FIELD, f"{name} ({provisioner}) is {_ONE_NODE}")
