"""What a ModelService serves, and on which pods."""

from itertools import combinations, pairwise
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from spotune.custom_resource.base import (
    NonNegativeInt,
    PositiveDuration,
    PositiveInt,
    SecretKeyRef,
    Section,
    invalid,
)
from spotune.custom_resource.pods import PodTemplate, ResourcesSpec
from spotune.service.field_types import (
    ClaimName,
    ClaimPath,
    GatewayName,
    HostName,
    ModelId,
    ModelSource,
    OptionalAddress,
    OptionalListener,
    OptionalMetric,
    OptionalModelId,
    OptionalNamespace,
)
from spotune.units.durations import Duration

_ALL_PERCENT: Final = 100
Percent = Annotated[int, Field(ge=1, le=_ALL_PERCENT)]


class ClaimSource(Section):
    """A folder on an existing volume."""

    name: ClaimName
    """Name of the PersistentVolumeClaim, in the namespace of the service."""
    path: ClaimPath
    """Folder on the volume, relative to its root: an export of spotune, or any transformers model with safetensors."""


class ServedModelSpec(Section):
    """The model to serve. Exactly one of finetuneJob, source and claim."""

    name: OptionalModelId = ""
    """Model id in the API. Empty: the name of the ModelService."""
    finetune_job: str = ""
    """Name of a FinetuneJob in the same namespace. The service starts when its model is trained."""
    source: ModelSource = ""
    """hf://owner/name: a model on the Hugging Face Hub. s3://bucket/prefix: the files of a transformers model with
    safetensors, or of an export, in a bucket; for each new model another prefix."""
    revision: str = "main"
    """With hf://: branch, tag or commit."""
    token_secret_ref: SecretKeyRef | None = None
    """With hf://: Secret with the token for a private or gated model."""
    claim: ClaimSource | None = None
    """A folder on an existing volume."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        given = [bool(self.finetune_job), bool(self.source), self.claim is not None]
        if sum(given) != 1:
            invalid("", "set exactly one of finetuneJob, source and claim")
        if not self.source.startswith("hf://"):
            if self.revision != "main":
                invalid("revision", "is only used with an hf:// source")
            if self.token_secret_ref is not None:
                invalid("tokenSecretRef", "is only used with an hf:// source")
        return self


class ServedAdapterSpec(Section):
    """A LoRA adapter, served beside the base model under its own id. Exactly one of finetuneJob and claim."""

    name: ModelId
    """Model id of the adapter in the API."""
    finetune_job: str = ""
    """Name of a FinetuneJob with output.mergeAdapter false, trained on the same base model."""
    claim: ClaimSource | None = None
    """A folder on an existing volume."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if bool(self.finetune_job) == (self.claim is not None):
            invalid("", "set exactly one of finetuneJob and claim")
        return self


class ReplicasSpec(Section):
    """Number of replicas. Each replica is one pod with its own copy of the model."""

    min: NonNegativeInt = 1
    """Minimum number of replicas. 0: without requests the service scales to zero, and the first request waits for a
    replica."""
    max: PositiveInt = 1
    """Maximum number of replicas."""
    target_ongoing_requests: PositiveInt = 8
    """Requests per replica that autoscaling aims at. Used if max is more than min."""
    scale_down_delay: PositiveDuration = Duration("5m")
    """Time of less load after which replicas are removed; twice as long for the last one. Used if max is more than
    min."""

    @model_validator(mode="after")
    def _check_min(self) -> Self:
        if self.min > self.max:
            invalid("min", f"{self.min} is more than max, {self.max}")
        return self

    @property
    def autoscales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max > self.min


class GatewaySpec(Section):
    """The gateway: it holds the clients' connections, and runs on on-demand nodes."""

    replicas: PositiveInt = 1
    """Number of gateway pods."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of a gateway pod."""
    pod_template: PodTemplate = Field(default={})
    """Pod template of the gateway. Fields that spotune sets win."""


class PromotionSpec(Section):
    """What a new version must fulfil, compared with the served one."""

    metric: OptionalMetric = ""
    """With model.finetuneJob: metric of the job's evaluation, by its name in status.evalScores, or loss. It is compared
    before the new version gets a request. Empty: no metric is compared."""
    not_worse_by: Annotated[float, Field(ge=0, le=10)] = 0.05
    """Allowed relative difference of the metric, of the median time to the first token, and of the median time per
    token."""
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Allowed excess of the error rate over that of the served version."""
    min_requests: PositiveInt = 20
    """Requests of the new version that a step before 100 waits for, up to three times pause."""


class RolloutSpec(Section):
    """How a new version of the model replaces the served one."""

    steps: list[Percent] = Field(
        default=[_ALL_PERCENT],
        min_length=1,
        max_length=20,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    """Percent of the requests that the new version gets, one step after the other. Ascending, and 100 at the end."""
    pause: PositiveDuration = Duration("5m")
    """Duration of each step before 100."""
    promote_if: PromotionSpec = PromotionSpec()
    """What the new version must fulfil. Otherwise it is rolled back."""

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if any(later <= earlier for earlier, later in pairwise(self.steps)):
            invalid("steps", "must be ascending, such as [10, 50, 100]")
        if self.steps[-1] != _ALL_PERCENT:
            invalid("steps", "must end with 100: the last step promotes the new version")
        return self


class IngressSpec(Section):
    """An Ingress in front of the service."""

    host: HostName
    """DNS name of the endpoint."""
    class_name: str = ""
    """IngressClass. Empty: the cluster's default class."""
    tls_secret_name: str = ""
    """Secret with certificate and key. Empty: no TLS."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the Ingress, for example for cert-manager."""


class ParentRefSpec(Section):
    """A Gateway that the HTTPRoute attaches to."""

    name: GatewayName
    """Name of the Gateway."""
    namespace: OptionalNamespace = ""
    """Namespace of the Gateway, whose listeners have to allow routes of the service's namespace. Empty: that of the
    service."""
    section_name: OptionalListener = ""
    """Name of one listener of the Gateway. Empty: all that allow the route."""


class HttpRouteSpec(Section):
    """An HTTPRoute of the Gateway API (v1) in front of the service. TLS belongs to the listener of the Gateway."""

    hostnames: list[HostName] = Field(
        min_length=1, max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """DNS names of the endpoint. The first one is in status.url."""
    parent_refs: list[ParentRefSpec] = Field(
        min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """The Gateways that the route attaches to."""
    url_scheme: Literal["https", "http"] = "https"
    """Scheme of status.url: http if the listener of the Gateway has no TLS."""
    disable_timeout: bool = True
    """true: the Gateway does not end long streams (timeouts.request is 0s). false: leave the field out, for controllers
    that reject it, such as GKE's; set a long timeout by their own means."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the HTTPRoute, for example for external-dns."""

    @model_validator(mode="after")
    def _check_parents(self) -> Self:
        for one, other in combinations(self.parent_refs, 2):
            same_gateway = (one.namespace, one.name) == (other.namespace, other.name)
            if same_gateway and (
                one.section_name == other.section_name or not (one.section_name and other.section_name)
            ):
                invalid("parentRefs", f"give each reference to the Gateway {one.name} another sectionName")
        return self


class ServingClusterSpec(Section):
    """Settings of the Ray cluster."""

    provider: Literal["auto", "aks", "gke", "eks", "none"] = "auto"
    """Cloud provider, which determines spot labels and taints. auto: detected from the nodes."""
    image: str = ""
    """Container image for serving. Empty: an image of the operator's version. With GPUs it has vLLM, unless the model
    is that of a FinetuneJob with task seq2seq."""
    ray_version: str = ""
    """Ray version of the image. Empty: the version in the operator's default image."""
    redis_address: OptionalAddress = ""
    """host:port of a Redis for Ray's cluster state. With it, a lost head pod does not interrupt the service."""
    redis_password_secret_ref: SecretKeyRef | None = None
    """Secret with the password of that Redis."""

    @model_validator(mode="after")
    def _check_redis(self) -> Self:
        if self.redis_password_secret_ref is not None and not self.redis_address:
            invalid("redisPasswordSecretRef", "is only used with redisAddress")
        return self


class ServingSpec(Section):
    """How to serve a model: all of a ModelService but the model itself. A FinetuneJob has it, too."""

    adapters: list[ServedAdapterSpec] = Field(
        default=[],
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """LoRA adapters on the base model, each from exactly one of finetuneJob and claim. A request chooses one by its
    model id."""
    replicas: ReplicasSpec = ReplicasSpec()
    """Number of replicas."""
    gpus: NonNegativeInt = 1
    """GPUs per replica. 0: replicas run on processors. vLLM splits each layer of the model over them (tensor
    parallelism)."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Engine of the replicas. auto: vllm for causal models on GPUs, else transformers."""
    batch_invariant: bool = False
    """With vLLM: kernels whose results do not depend on the batch. An answer that moves to another replica then keeps
    its text in bfloat16, too, unless it uses penalties or top_p."""
    capacity: Literal["spot", "on-demand", "mixed"] = "spot"
    """Kind of nodes for the replicas. mixed: the first onDemandBase replicas on on-demand nodes, the rest on spot."""
    on_demand_base: PositiveInt = 1
    """With mixed: number of replicas on on-demand nodes."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of a replica. The GPUs are added automatically."""
    priority_class_name: str = ""
    """PriorityClass of the replicas. With a higher priority than training, replicas may take GPUs of training jobs."""
    service_account_name: str = ""
    """Service account of the pods. By its workload identity they read the bucket of model.source, and CSI drivers
    mount buckets as claims."""
    pod_template: PodTemplate = Field(default={})
    """Pod template of the replicas. Fields that spotune sets win."""
    gateway: GatewaySpec = GatewaySpec()
    """The gateway pods."""
    api_keys_secret_ref: SecretKeyRef | None = None
    """Secret with API keys, one per line, which may change. Requests then need one of them. Absent: none is needed."""
    request_timeout: PositiveDuration = Duration("10m")
    """Maximum duration of a request."""
    rollout: RolloutSpec = RolloutSpec()
    """How a new version of the model replaces the served one. Without it: all at once, when the new one is ready."""
    ingress: IngressSpec | None = None
    """An Ingress in front of the service. Without it and httpRoute the service is reachable inside the cluster only."""
    http_route: HttpRouteSpec | None = None
    """An HTTPRoute of the Gateway API in front of the service. With an Ingress, too, status.url is that of the
    HTTPRoute. Absent: none."""
    cluster: ServingClusterSpec = ServingClusterSpec()
    """Settings of the Ray cluster."""
    suspend: bool = False
    """true: stop all pods and release the nodes. false: serve."""

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        names = [adapter.name for adapter in self.adapters]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            invalid("adapters", f"the name {repeated[0]!r} is given more than once: every adapter needs its own")
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "vllm" and self.gpus == 0:
            invalid("engine", "vllm needs a GPU: set gpus, or leave engine to auto")
        if self.batch_invariant and (self.engine == "transformers" or self.gpus == 0):
            invalid("batchInvariant", "is only used with vLLM, which runs on GPUs")
        return self

    @model_validator(mode="after")
    def _check_capacity(self) -> Self:
        if self.capacity == "mixed" and self.on_demand_base > self.replicas.max:
            reason = f"{self.on_demand_base} is more than replicas.max, {self.replicas.max}"
            invalid("onDemandBase", reason)
        return self


class _WithModel(Section):
    """The model; a base class, so that it is the first field."""

    model: ServedModelSpec
    """The model to serve. Exactly one of finetuneJob, source and claim."""


class ModelServiceSpec(ServingSpec, _WithModel):
    """Which model to serve and how."""

    @model_validator(mode="after")
    def _check_metric(self) -> Self:
        if self.rollout.promote_if.metric and not self.model.finetune_job:
            invalid("rollout.promoteIf.metric", "is only used with model.finetuneJob, which evaluates the model")
        return self
