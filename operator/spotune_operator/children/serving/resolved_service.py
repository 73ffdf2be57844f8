"""The resolved service: the spec with all defaults resolved, and the names and labels of its children."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Final, Self

from spotune.custom_resource.object_names import SERVICE_LABEL as SERVICE_LABEL
from spotune.service import SERVICE_KIND, ModelService, PinnedServiceStatus, ReplicasSpec
from spotune_operator.children.owner import Owner
from spotune_operator.children.resolved_job import RAY_VERSION
from spotune_operator.kube.digest import digest
from spotune_operator.providers import Capacity, Provider
from spotune_operator.settings import OPERATOR_NAMESPACE

_STEP: Final = re.compile(r".+-step-(\d+)")

MODELS: Final = PurePosixPath("/models")
"""Folder of the pods that holds the mounted claims, each under its name."""

_PREFIX: Final = "spotunems-"
"""The children of jobs begin with ``spotune-``, so no job has a child of the same name."""
_MAX_CHILD_NAME: Final = 44
"""KubeRay appends 6 characters to name a RayCluster. It cuts a name of more than 50 for the Secret of the cluster."""
_DIGEST_CHARACTERS: Final = 8


@dataclass(frozen=True)
class DefaultImages:
    """Images of services that name none.

    Attributes:
        serve: Without vLLM.
        serve_vllm: With vLLM. It has the engine on transformers, too.
    """

    serve: str
    serve_vllm: str

    @classmethod
    def of(cls, serve: str = "", serve_vllm: str = "") -> Self:
        """These images; empty: those of this version."""
        return cls(serve or _image("serve"), serve_vllm or _image("serve-vllm"))


@cache
def _image(name: str) -> str:
    return f"spotune/{name}:{version('spotune')}"


@dataclass(frozen=True)
class ModelLocation:
    """Where a model or an adapter is: on a claim or, with ``source``, on the Hugging Face Hub or in a bucket.

    Attributes:
        claim: Name of the PersistentVolumeClaim; empty with ``source``.
        path: Folder on its volume, relative to the root.
        source: ``hf://owner/name`` or ``s3://bucket/prefix``; empty with ``claim``.
        version: Identifies the weights: when it changes, the new version is rolled out.
    """

    claim: str = ""
    path: str = ""
    source: str = ""
    version: str = ""

    @property
    def step(self) -> int | None:
        """The step of a FinetuneJob's export, which its version ends with; None for other models."""
        match = _STEP.fullmatch(self.version) if self.version != self.path else None
        return int(match[1]) if match and self.claim else None

    @property
    def revision(self) -> str:
        """The revision on the Hub; empty for models that are elsewhere."""
        return self.version if self.source.startswith("hf://") else ""

    @property
    def directory(self) -> str:
        """The folder in the pods, or the source."""
        return self.source or str(MODELS / self.claim / self.path.strip("/"))


@dataclass(frozen=True)
class DeployedVersion:
    """A version of the model with its adapters, as one Ray Serve application.

    Attributes:
        application: Name of the application.
        name: Name of the version in ``/stats`` and in the header ``x-spotune-version``.
        model: Where the model is.
        adapters: Where its adapters are, by model id.
        weight: Percent of the requests that it gets; None: it only finishes the requests that it has.
        replicas: Number of its replicas.
        task: ``causal`` or ``seq2seq``; empty: not known.
    """

    application: str
    name: str
    model: ModelLocation
    adapters: Mapping[str, ModelLocation]
    weight: int | None
    replicas: ReplicasSpec
    task: str = ""

    @property
    def claims(self) -> set[str]:
        """Names of the claims with model and adapters."""
        return {location.claim for location in (self.model, *self.adapters.values()) if location.claim}


def application_name(model: ModelLocation, adapters: Mapping[str, ModelLocation]) -> str:
    """Name of the Ray Serve application of a version: ``model-`` and a digest of everything that identifies it."""
    located = {name: [location.directory, location.version] for name, location in adapters.items()}
    return f"model-{digest([model.directory, model.version, located])[:_DIGEST_CHARACTERS]}"


@dataclass(frozen=True)
class ResolvedService:
    """A service with all defaults resolved. Made by ``resolve_service``.

    Attributes:
        service: The service.
        provider: Provider of the nodes.
        versions: The versions of its model that run, the served one first.
        claims: Names of the claims that the pods mount, in alphabetical order.
        images: Default images.
        ray_version: Version of Ray in the images.
        uid: ``metadata.uid`` of the ModelService; empty outside a cluster: the children then have no owner.
        operator_namespace: Namespace of the operator.
        monitoring_namespace: Namespace of the Prometheus that scrapes the pods; empty: none.
        active_cluster: Name of the RayCluster that gets the requests; empty: any cluster of the service.
        pinned: The pin in its status; None without one.
    """

    service: ModelService
    provider: Provider
    versions: Sequence[DeployedVersion]
    claims: Sequence[str]
    images: DefaultImages
    ray_version: str
    uid: str = ""
    operator_namespace: str = OPERATOR_NAMESPACE
    monitoring_namespace: str = ""
    active_cluster: str = ""
    pinned: PinnedServiceStatus | None = None

    @property
    def name(self) -> str:
        """Name of every child."""
        return child_name(self.service.metadata.name)

    @property
    def image(self) -> str:
        """Image of all containers."""
        default = self.images.serve_vllm if self.may_use_vllm else self.images.serve
        return self.service.spec.cluster.image or default

    @property
    def may_use_vllm(self) -> bool:
        """Whether replicas have GPUs, and a model that is not known to be an encoder-decoder model.

        With engine ``auto``, ``spotune_serve`` chooses when it sees the model. vLLM has no encoder-decoder models.
        """
        spec = self.service.spec
        if spec.engine != "auto":
            return spec.engine == "vllm"
        return spec.gpus > 0 and any(version.task != "seq2seq" for version in self.versions)

    @property
    def owner(self) -> Owner:
        """The service as the owner of its children."""
        metadata = self.service.metadata
        return Owner(SERVICE_KIND, metadata.name, metadata.namespace, SERVICE_LABEL, self.name, self.uid)

    @property
    def url(self) -> str:
        """URL of the endpoint, to which clients of OpenAI's API append ``/v1``."""
        route, given = self.service.spec.http_route, self.service.spec.ingress
        if route is not None:
            return f"{route.url_scheme}://{route.hostnames[0]}"
        if given is not None:
            return f"{'https' if given.tls_secret_name else 'http'}://{given.host}"
        return f"http://{self.name}.{self.service.metadata.namespace}.svc"

    @property
    def capacities(self) -> tuple[Capacity, ...]:
        """The capacity type of each group of replicas."""
        capacity = self.service.spec.capacity
        return ("on-demand", "spot") if capacity == "mixed" else (capacity,)

    @property
    def request_timeout_seconds(self) -> int:
        """Maximum duration of a request, in whole seconds."""
        return math.ceil(self.service.spec.request_timeout.seconds)


def only_version(service: ModelService, model: ModelLocation, adapters: Mapping[str, ModelLocation]) -> DeployedVersion:
    """The version of a service that has no other: it gets all requests."""
    application = application_name(model, adapters)
    return DeployedVersion(application, model.version, model, adapters, 100, service.spec.replicas)


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
    versions: Sequence[DeployedVersion],
    claims: Sequence[str] | None = None,
    images: DefaultImages | None = None,
    ray_version: str = "",
    uid: str = "",
    operator_namespace: str = OPERATOR_NAMESPACE,
    monitoring_namespace: str = "",
    active_cluster: str = "",
    pinned: PinnedServiceStatus | None = None,
) -> ResolvedService:
    """Resolve the defaults of a service.

    Args:
        service: The service.
        provider: Provider of the nodes.
        versions: The versions of its model that run, the served one first.
        claims: Names of the claims that the pods mount; None: those that the versions need.
        images: Default images; None: this version's.
        ray_version: Version of Ray in them; empty: this version's.
        uid: ``metadata.uid`` of the ModelService.
        operator_namespace: Namespace of the operator.
        monitoring_namespace: Namespace of the Prometheus that scrapes the pods; empty: none.
        active_cluster: ``status.activeServiceStatus.rayClusterName`` of the RayService. During an upgrade there are two
            clusters: clients must not connect to the gateway of the one whose replicas are still starting.
        pinned: The pin in the status of the service.
    """
    cluster = service.spec.cluster
    needed = {claim for version in versions for claim in version.claims}
    return ResolvedService(
        service=service,
        provider=provider,
        versions=versions,
        claims=sorted(needed if claims is None else claims),
        images=images or DefaultImages.of(),
        ray_version=cluster.ray_version or ray_version or RAY_VERSION,
        uid=uid,
        operator_namespace=operator_namespace,
        monitoring_namespace=monitoring_namespace,
        active_cluster=active_cluster,
        pinned=pinned,
    )
