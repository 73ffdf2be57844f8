"""The oldest Kubernetes and KubeRay that spotune works with, and how a cluster is checked for them.

The chart, the operator at its start and `spotune doctor` check the same; docs/support.md has the tested versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

Manifest = Mapping[str, Any]

OLDEST_KUBERNETES: Final = (1, 29)
"""API servers have `fieldPath` and `reason` of CEL rules since 1.28; since 1.29 nobody can switch CEL rules off."""
OLDEST_KUBERAY: Final = (1, 5, 1)
"""The first version with working token authentication (``authOptions``)."""
UPGRADE_KUBERNETES: Final = "upgrade the cluster to Kubernetes 1.29 or newer"
INSTALL_KUBERAY: Final = "install KubeRay 1.5.1 or newer with its Helm chart kuberay-operator or its manifests"
UPGRADE_KUBERAY: Final = f"{INSTALL_KUBERAY}; helm does not upgrade CRDs that are already installed"
TOO_OLD_KUBERAY: Final = (
    "the RayCluster CRD has no authOptions: KubeRay is older than 1.5 and has no token authentication"
)
NO_KUBERAY: Final = "RayClusters are not defined in this cluster: KubeRay is not installed"
RAY: Final = "ray.io/v1"
"""KubeRay's group and version."""


def is_too_old(version: Manifest) -> bool:
    """Whether an API server with this response of ``/version`` is older than `OLDEST_KUBERNETES`."""
    found = tuple(int(re.sub(r"\D.*", "", str(version[part])) or 0) for part in ("major", "minor"))
    return found < OLDEST_KUBERNETES


def kubernetes_version(version: Manifest) -> str:
    """The version in a response of ``/version``, such as 1.34.4-gke.100."""
    return str(version["gitVersion"]).removeprefix("v")


def schema_of(published: Manifest | None, kind: str) -> Manifest:
    """The schema of a kind in an OpenAPI document of the API server; empty if it is missing."""
    schemas: Mapping[str, Any] = ((published or {}).get("components") or {}).get("schemas") or {}
    return next((schema for name, schema in schemas.items() if name.endswith(f".{kind}")), {})


def properties_of(schema: Manifest) -> Manifest:
    """The fields of a schema by name."""
    found: Manifest = schema.get("properties") or {}
    return found


def kuberay_problem(published: Manifest | None) -> tuple[str, str] | None:
    """What is wrong with KubeRay's CRDs, and the remedy; None if nothing is.

    Args:
        published: OpenAPI document of ``ray.io/v1``; None if the API server does not serve this group.
    """
    spec = properties_of(schema_of(published, "RayCluster")).get("spec")
    if spec is None:
        return NO_KUBERAY, INSTALL_KUBERAY
    if "authOptions" not in properties_of(spec):
        return TOO_OLD_KUBERAY, UPGRADE_KUBERAY
    return None


def unmet_requirement(version: Manifest | None, published: Manifest | None) -> str | None:
    """Why the operator cannot work in a cluster, and the remedy; None if it can. Arguments as above."""
    if version is not None and is_too_old(version):
        return f"Kubernetes {kubernetes_version(version)} is too old: {UPGRADE_KUBERNETES}"
    if problem := kuberay_problem(published):
        return ": ".join(problem)
    return None
