"""Provider ids, labels and taints of spot and on-demand GPU nodes of AKS, GKE and EKS.

Sources: AKS "Add an Azure Spot node pool", GKE "Spot VMs" and "GPUs", EKS "Managed node group capacity types".
"""

from enum import StrEnum


class Provider(StrEnum):
    """The provider whose node pools a node imitates."""

    NONE = "none"
    AKS = "aks"
    GKE = "gke"
    EKS = "eks"


class Capacity(StrEnum):
    """The capacity type of a node."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"


def provider_id(provider: Provider, node: str, zone: str) -> str:
    """The node's `spec.providerID`, "" for none."""
    match provider:
        case Provider.AKS:
            group = "/subscriptions/0/resourceGroups/mc_test/providers/Microsoft.Compute"
            return f"azure://{group}/virtualMachineScaleSets/aks-{node}-vmss/virtualMachines/0"
        case Provider.GKE:
            return f"gce://test-project/{zone or 'europe-west4-a'}/gke-test-{node}"
        case Provider.EKS:
            return f"aws:///{zone or 'eu-west-1a'}/i-0{node:0>16}"
        case Provider.NONE:
            return ""


def labels(provider: Provider, capacity: Capacity, gpus: int) -> dict[str, str]:
    """The labels by which a provider marks spot and GPU nodes."""
    spot = capacity is Capacity.SPOT
    match provider:
        case Provider.AKS:
            found = {"kubernetes.azure.com/scalesetpriority": "spot"} if spot else {}
            return found | ({"kubernetes.azure.com/accelerator": "nvidia"} if gpus else {})
        case Provider.GKE:
            found = {"cloud.google.com/gke-spot": "true"} if spot else {}
            return found | ({"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"} if gpus else {})
        case Provider.EKS:
            return {"eks.amazonaws.com/capacityType": "SPOT" if spot else "ON_DEMAND"}
        case Provider.NONE:
            return {}


def taints(provider: Provider, capacity: Capacity, gpus: int) -> list[dict[str, str]]:
    """The taints that a provider adds to such nodes (`v1.Taint`s)."""
    found: list[dict[str, str]] = []
    if provider is Provider.AKS and capacity is Capacity.SPOT:
        found.append({"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"})
    if provider is Provider.GKE and gpus:
        found.append({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"})
    return found
