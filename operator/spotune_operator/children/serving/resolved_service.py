"""The resolved service: the spec with all defaults resolved, and the names and labels of its children."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Final

from spotune.service import SERVICE_KIND, ModelService
from spotune_operator.children.owner import Owner
from spotune_operator.children.resolved_job import RAY_VERSION
from spotune_operator.providers import Capacity, Provider
from spotune_operator.settings import OPERATOR_NAMESPACE

SERVICE_LABEL: Final = "spotune.dev/service"
"""Label of all objects of a service; its value is the name of the service."""
MODELS: Final = PurePosixPath("/models")
"""Folder of the pods that holds the mounted claims, each under its name."""

_PREFIX: Final = "spotunems-"
"""The children of jobs begin with ``spotune-``, so no job has a child of the same name."""
_MAX_CHILD_NAME: Final = 44
"""KubeRay appends 6 characters to name a RayCluster. It cuts a name of more than 50 for the Secret of the cluster."""
_DIGEST_CHARACTERS: Final = 8


@cache
def default_serve_image() -> str:
    """This version's image for serving."""
    return f"spotune/serve:{version('spotune')}"


@dataclass(frozen=True)
class ModelLocation:
    """Where a model or an adapter is: on a claim or, with ``source``, on the Hugging Face Hub.

    Attributes:
        claim: Name of the PersistentVolumeClaim; empty with ``source``.
        path: Folder on its volume, relative to the root.
        source: ``hf://owner/name``; empty with ``claim``.
        version: Identifies the weights: when it changes, the service is deployed anew.
    """

    claim: str = ""
    path: str = ""
    source: str = ""
    version: str = ""

    @property
    def directory(self) -> str:
        """The folder in the pods, or the source."""
        return self.source or str(MODELS / self.claim / self.path.strip("/"))


@dataclass(frozen=True)
class ResolvedService:
    """A service with all defaults resolved. Made by ``resolve_service``.

    Attributes:
        service: The service.
        provider: Provider of the nodes.
        model: Where its model is.
        adapters: Where its adapters are, by model id.
        image: Image of all containers.
        ray_version: Version of Ray in that image.
        uid: ``metadata.uid`` of the ModelService; empty outside a cluster: the children then have no owner.
        operator_namespace: Namespace of the operator.
        monitoring_namespace: Namespace of the Prometheus that scrapes the pods; empty: none.
        active_cluster: Name of the RayCluster that gets the requests; empty: any cluster of the service.
    """

    service: ModelService
    provider: Provider
    model: ModelLocation
    image: str
    ray_version: str
    adapters: Mapping[str, ModelLocation] = field(default_factory=dict)
    uid: str = ""
    operator_namespace: str = OPERATOR_NAMESPACE
    monitoring_namespace: str = ""
    active_cluster: str = ""

    @property
    def name(self) -> str:
        """Name of every child."""
        return child_name(self.service.metadata.name)

    @property
    def owner(self) -> Owner:
        """The service as the owner of its children."""
        metadata = self.service.metadata
        return Owner(SERVICE_KIND, metadata.name, metadata.namespace, SERVICE_LABEL, self.name, self.uid)

    @property
    def url(self) -> str:
        """URL of the endpoint, to which clients of OpenAI's API append ``/v1``."""
        given = self.service.spec.ingress
        if given is not None:
            return f"{'https' if given.tls_secret_name else 'http'}://{given.host}"
        return f"http://{self.name}.{self.service.metadata.namespace}.svc"

    @property
    def claims(self) -> tuple[str, ...]:
        """Names of the claims with model and adapters, in alphabetical order."""
        return tuple(sorted({location.claim for location in self._locations if location.claim}))

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of model and adapters."""
        return tuple(location.version for location in self._locations)

    @property
    def capacities(self) -> tuple[Capacity, ...]:
        """The capacity type of each group of replicas."""
        capacity = self.service.spec.capacity
        return ("on-demand", "spot") if capacity == "mixed" else (capacity,)

    @property
    def request_timeout_seconds(self) -> int:
        """Maximum duration of a request, in whole seconds."""
        return math.ceil(self.service.spec.request_timeout.seconds)

    @property
    def _locations(self) -> tuple[ModelLocation, ...]:
        return (self.model, *(self.adapters[name] for name in sorted(self.adapters)))


def child_name(service: str) -> str:
    """Name of every child of a service: ``spotunems-`` and the name of the service.

    Names of more than 34 characters are cut, with a digest in place of the rest, because KubeRay limits the length.
    """
    name = f"{_PREFIX}{service}"
    if len(name) <= _MAX_CHILD_NAME:
        return name
    digest = hashlib.sha256(service.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{name[: _MAX_CHILD_NAME - _DIGEST_CHARACTERS - 1]}-{digest}"


def resolve_service(
    service: ModelService,
    provider: Provider,
    *,
    model: ModelLocation,
    adapters: Mapping[str, ModelLocation],
    image: str = "",
    ray_version: str = "",
    uid: str = "",
    operator_namespace: str = OPERATOR_NAMESPACE,
    monitoring_namespace: str = "",
    active_cluster: str = "",
) -> ResolvedService:
    """Resolve the defaults of a service.

    Args:
        service: The service.
        provider: Provider of the nodes.
        model: Where its model is.
        adapters: Where its adapters are, by model id.
        image: Default image; empty: this version's.
        ray_version: Version of Ray in that image; empty: this version's.
        uid: ``metadata.uid`` of the ModelService.
        operator_namespace: Namespace of the operator.
        monitoring_namespace: Namespace of the Prometheus that scrapes the pods; empty: none.
        active_cluster: ``status.activeServiceStatus.rayClusterName`` of the RayService. During an upgrade there are two
            clusters: clients must not connect to the gateway of the one whose replicas are still starting.
    """
    cluster = service.spec.cluster
    return ResolvedService(
        service=service,
        provider=provider,
        model=model,
        adapters=adapters,
        image=cluster.image or image or default_serve_image(),
        ray_version=cluster.ray_version or ray_version or RAY_VERSION,
        uid=uid,
        operator_namespace=operator_namespace,
        monitoring_namespace=monitoring_namespace,
        active_cluster=active_cluster,
    )
