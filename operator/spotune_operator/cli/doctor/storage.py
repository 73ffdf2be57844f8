"""The storage class that jobs would get their shared volume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotune_operator.cli.doctor.check import Check, Hidden, failed, passed, warning
from spotune_operator.errors import StorageClassError
from spotune_operator.providers import Provider, ProviderName, refuse_unfit_class

Manifest = Mapping[str, Any]

_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
_SHARED: Final = (
    "file.csi.azure.com",  # NFS; SMB is refused before
    "azurelustre.csi.azure.com",
    "filestore.csi.storage.gke.io",
    "lustre.csi.storage.gke.io",
    "efs.csi.aws.com",
    "fsx.csi.aws.com",
    "nfs.csi.k8s.io",
    "cephfs.csi.ceph.com",
)
"""Provisioners whose volumes several nodes can write to; an operator's prefix may stand before the name."""
_NAME_ANOTHER: Final = "name one with ReadWriteMany volumes in spec.storage.storageClassName (here: --storage-class)"

_MAKE: Final[Mapping[ProviderName, str]] = {
    ProviderName.AKS: "apply manifests/aks/storageclass.yaml",
    ProviderName.EKS: "fill in and apply manifests/eks/storageclass.yaml",
    ProviderName.GKE: "enable the cluster's add-on GcpFilestoreCsiDriver, which brings it",
}
"""How a provider's usual class is had where it is missing."""


def storage(classes: Sequence[Manifest] | Hidden, provider: Provider, wanted: str) -> Check:
    """Whether there is a class with volumes that all pods of a job can write to.

    Args:
        classes: The cluster's ``StorageClass``es.
        provider: Whose cluster it is.
        wanted: The class that jobs will name; empty: none, so they get the provider's or the default one.
    """
    if isinstance(classes, Hidden):
        return warning("storage", f"storage classes cannot be seen: {classes.reason}")
    name = wanted or provider.storage_class or _default(classes)
    if not name:
        message = "there is no default storage class, and the nodes are of no cloud whose usual one is known"
        return failed("storage", message, _NAME_ANOTHER)
    found = next((item for item in classes if item["metadata"]["name"] == name), None)
    if found is None:
        there = ", ".join(sorted(item["metadata"]["name"] for item in classes)) or "none"
        make = _MAKE[provider.name] if name == provider.storage_class else "make it"
        return failed("storage", f"there is no storage class {name}; there is {there}", f"{make}, or {_NAME_ANOTHER}")
    return _fitness(found)


def _default(classes: Sequence[Manifest]) -> str:
    marked = (
        item["metadata"]
        for item in classes
        if (item["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
    )
    return next((metadata["name"] for metadata in marked), "")


def _fitness(found: Manifest) -> Check:
    name, provisioner = found["metadata"]["name"], found["provisioner"]
    try:
        refuse_unfit_class(found)
    except StorageClassError as error:
        return failed("storage", error.problems[0].message, _NAME_ANOTHER)
    if provisioner.endswith(_SHARED):
        return passed("storage", f"{name} ({provisioner}) has ReadWriteMany volumes")
    message = f"whether {name} ({provisioner}) has ReadWriteMany volumes cannot be seen in the class"
    return warning("storage", message, "if it has not, a job's claim stays Pending, or its workers do")
