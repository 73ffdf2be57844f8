"""The status of a ModelService: written by the operator, only read by users."""

from pydantic import ConfigDict, Field

from spotune.job.base import Section
from spotune.job.status import Condition


class ServedVersionStatus(Section):
    """The version of the model that is served."""

    model_config = ConfigDict(extra="ignore")

    location: str
    """Where the model is: pvc://claim/path or hf://owner/name."""
    version: str
    """Identifies the weights: the fingerprint and step of a FinetuneJob, or the revision of a source."""


class ModelServiceStatus(Section):
    """Health of a service."""

    model_config = ConfigDict(extra="ignore")

    observed_generation: int = 0
    """metadata.generation that this status was computed for."""
    phase: str = ""
    """Phase of the service, for display."""
    model: ServedVersionStatus | None = None
    """The version of the model that is served."""
    adapters: dict[str, ServedVersionStatus] = Field(default={})
    """The versions of the adapters that are served, by model id."""
    replicas: str = ""
    """Ready and desired replicas, such as 1/3."""
    ready_replicas: int = 0
    """Number of ready replicas."""
    url: str = ""
    """Base URL of the API."""
    ray_service: str = ""
    """Name of the RayService."""
    image: str = ""
    """Container image of the pods. It is pinned: an operator upgrade does not change it."""
    default_image: str = ""
    """The operator's default image when the image was pinned."""
    conditions: list[Condition] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """Conditions: Ready, Reconciling, Stalled, ModelAvailable, ClusterReady, ReplicasReady."""
