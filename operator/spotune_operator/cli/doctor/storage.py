"""Checks the StorageClass that jobs would get their shared volume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotune_operator.cli.doctor.check import Check, Forbidden, failed, passed, warning
from spotune_operator.errors import StorageClassError
from spotune_operator.providers import Provider, ProviderName, refuse_unfit_class

Manifest = Mapping[str, Any]

_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
_SHARED: Final = (
    "file.csi.azure.com",  # NFS; refuse_unfit_class rejects SMB
    "azurelustre.csi.azure.com",
    "filestore.csi.storage.gke.io",
    "lustre.csi.storage.gke.io",
    "efs.csi.aws.com",
    "fsx.csi.aws.com",
    "nfs.csi.k8s.io",
    "cephfs.csi.ceph.com",
)
"""Provisioners that support ReadWriteMany; the name may have a prefix, for example Rook's."""
_NAME_ANOTHER: Final = (
    "set spec.storage.storageClassName to a class with ReadWriteMany volumes (check it with --storage-class), or keep "
    "jobs in a bucket by spec.storage.bucket"
)

_MAKE: Final[Mapping[ProviderName, str]] = {
    ProviderName.AKS: "apply manifests/aks/storageclass.yaml",
    ProviderName.EKS: "complete and apply manifests/eks/storageclass.yaml",
    ProviderName.GKE: "enable the cluster's add-on GcpFilestoreCsiDriver, which creates it",
}
"""How to create a provider's default class if it is missing."""


def storage(classes: Sequence[Manifest] | Forbidden, provider: Provider, requested: str) -> Check:
    """Check that there is a StorageClass whose volumes all pods of a job can write to.

    Args:
        classes: The cluster's StorageClasses.
        provider: Cloud provider of the cluster.
        requested: Class that jobs will use; empty: the provider's class or the cluster's default.
    """
    if isinstance(classes, Forbidden):
        return warning("storage", f"cannot list storage classes: {classes.reason}")
    name = requested or provider.storage_class or _default(classes)
    if not name:
        message = "there is no default storage class, and no known default for the provider of the nodes"
        return failed("storage", message, _NAME_ANOTHER)
    found = next((item for item in classes if item["metadata"]["name"] == name), None)
    if found is None:
        existing = ", ".join(sorted(item["metadata"]["name"] for item in classes)) or "none"
        make = _MAKE[provider.name] if name == provider.storage_class else "create it"
        return failed(
            "storage", f"there is no storage class {name}; existing classes: {existing}", f"{make}, or {_NAME_ANOTHER}"
        )
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
        return passed("storage", f"{name} ({provisioner}) supports ReadWriteMany volumes")
    message = f"cannot tell whether {name} ({provisioner}) supports ReadWriteMany volumes"
    return warning("storage", message, "if it does not, a job's claim or its workers stay Pending")
