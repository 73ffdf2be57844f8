"""The status of a ModelService: written by the operator, only read by users."""

from pydantic import Field

from spotune.custom_resource.status import Conditions, StatusSection, Timestamp


class LocationStatus(StatusSection):
    """A version of a model or of an adapter."""

    location: str
    """Where the model is: pvc://claim/path, hf://owner/name or s3://bucket/prefix."""
    version: str
    """Identifies the weights: directory and step of a FinetuneJob, the revision on the
    Hub, the prefix in a bucket, or the path on a claim."""


class ServedVersionStatus(LocationStatus):
    """A version of the model with its adapters."""

    name: str = ""
    """Name of the version in the header x-spotune-version: as version, unless another one has that name."""
    application: str = ""
    """Name of its Ray Serve application."""
    adapters: dict[str, LocationStatus] = Field(default={})
    """Its adapters, by model id."""
    scores: dict[str, float] = Field(default={})
    """Metrics of the FinetuneJob's evaluation of this version."""
    task: str = ""
    """Task of the FinetuneJob: causal or seq2seq. Empty: not known."""


class RetiringVersionStatus(ServedVersionStatus):
    """A version that gets no new requests, and stays until its running ones have ended."""

    since: Timestamp
    """Time at which it lost its requests (RFC 3339)."""
    weight: int = 100
    """Percent of the replicas that it keeps."""


class RolloutStatus(StatusSection):
    """A rollout in progress: the pending model beside the served one."""

    version: str
    """The new version."""
    application: str = ""
    """Name of its Ray Serve application."""
    weight: int = 0
    """Percent of the requests that it gets."""
    step: int = 0
    """Percent that it gets next, once its replicas run. Equal to weight during the pause."""
    step_started_at: Timestamp
    """Time at which weight changed last, or the rollout began (RFC 3339)."""
    unhealthy_since: Timestamp | None = None
    """Time since which Ray Serve reports its replicas as unhealthy (RFC 3339)."""
    reason: str = ""
    """What the rollout waits for."""


class RejectedStatus(StatusSection):
    """A version that was rolled back. It is tried again when the version or spec.rollout changes."""

    version: str
    """The version."""
    application: str = ""
    """Name of its Ray Serve application."""
    reason: str
    """Why it was rolled back."""
    time: Timestamp
    """When it was rolled back (RFC 3339)."""
    rollout_spec: str = ""
    """Hash of spec.rollout at that time."""


class PinnedServiceStatus(StatusSection):
    """What the running pods were rendered to. A change of the spec updates it; an operator upgrade does not."""

    inputs: str
    """Hash of all that it was rendered from."""
    ray_cluster: str
    """The rendered spec of the RayCluster without its numbers of pods, as JSON."""
    arguments: str
    """The rendered arguments of gateway and model in Ray Serve, as JSON."""


class ModelServiceStatus(StatusSection):
    """Health of a service."""

    observed_generation: int = 0
    """metadata.generation that this status was computed for."""
    phase: str = ""
    """Phase of the service, for display."""
    model: ServedVersionStatus | None = None
    """The version of the model that gets all requests, or most of them."""
    pending_model: ServedVersionStatus | None = None
    """The version that is being deployed."""
    rollout: RolloutStatus | None = None
    """The rollout of the pending model in the running cluster."""
    rejected: RejectedStatus | None = None
    """The version that was rolled back last."""
    retiring: list[RetiringVersionStatus] = Field(default=[], json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """Versions whose running requests have not ended yet."""
    claims: list[str] = Field(default=[], json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """Claims that the pods mount."""
    requests_per_second: float | None = None
    """Requests that ended per second over the last minute."""
    first_token_milliseconds_p50: int | None = None
    """Median time to the first token over the last minute, in milliseconds."""
    adapters: dict[str, LocationStatus] = Field(default={})
    """The newest versions of the adapters, by model id."""
    replicas: str = ""
    """Ready and desired replicas, such as 1/3."""
    ready_replicas: int = 0
    """Number of replicas that have loaded the model and take requests."""
    url: str = ""
    """Base URL of the API."""
    ray_service: str = ""
    """Name of the RayService."""
    image: str = ""
    """Container image of the pods. It is pinned: an operator upgrade does not change it."""
    default_image: str = ""
    """The operator's default image when the service was created."""
    default_vllm_image: str = ""
    """The operator's default image with vLLM when the service was created."""
    default_ray_version: str = ""
    """Ray version of the default images."""
    provider: str = ""
    """Cloud provider of the nodes when the service was created."""
    pinned: PinnedServiceStatus | None = None
    """Pod templates and arguments of the running cluster."""
    conditions: Conditions = Field(default=[])
    """Conditions: Ready, Reconciling, Stalled, Suspended, ModelAvailable, ReplicasReady, RolledOut."""
