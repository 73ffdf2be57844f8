"""The status of a ModelService: written by the operator, only read by users."""

from pydantic import Field

from spotune.custom_resource.status import Conditions, StatusSection


class ServedVersionStatus(StatusSection):
    """The version of the model that is served."""

    location: str
    """Where the model is: pvc://claim/path or hf://owner/name."""
    version: str
    """Identifies the weights: directory and step of a FinetuneJob, the revision of a source, or the path on a claim."""


class ModelServiceStatus(StatusSection):
    """Health of a service."""

    observed_generation: int = 0
    """metadata.generation that this status was computed for."""
    phase: str = ""
    """Phase of the service, for display."""
    model: ServedVersionStatus | None = None
    """The version of the model that is served."""
    pending_model: ServedVersionStatus | None = None
    """The version that is being deployed."""
    adapters: dict[str, ServedVersionStatus] = Field(default={})
    """The newest versions of the adapters, by model id."""
    replicas: str = ""
    """Ready and desired replica pods, such as 1/3."""
    ready_replicas: int = 0
    """Number of ready replica pods."""
    url: str = ""
    """Base URL of the API."""
    ray_service: str = ""
    """Name of the RayService."""
    image: str = ""
    """Container image of the pods. It is pinned: an operator upgrade does not change it."""
    default_image: str = ""
    """The operator's default image when the service was created."""
    default_ray_version: str = ""
    """Ray version of the default image."""
    provider: str = ""
    """Cloud provider of the nodes when the service was created."""
    conditions: Conditions = Field(default=[])
    """Conditions: Ready, Reconciling, Stalled, Suspended, ModelAvailable, ReplicasReady."""
