"""Where it runs: pods, storage and the cluster. None of it concerns `spotune run` but workers.count, min and gpus."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from spotune.job.base import NotNegative, Positive, Section, invalid
from spotune.units.durations import Duration
from spotune.units.quantities import Quantity

PodTemplate = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


class ResourcesSpec(Section):
    """Kubernetes resource requirements of a pod's Ray container."""

    requests: dict[str, Quantity] = Field(default={})
    """Amounts that are reserved, by resource name: cpu, memory, ephemeral-storage."""
    limits: dict[str, Quantity] = Field(default={})
    """Amounts that are not exceeded, by resource name."""


class WorkersSpec(Section):
    """The workers; one GPU is one worker process."""

    count: Positive = 1
    """Pods wanted (`spotune run`: worker processes per gpus)."""
    min: Positive = 1
    """Training goes on with as few pods as this when more cannot be had."""
    gpus: NotNegative = 1
    """GPUs per pod; 0: one CPU worker per pod."""
    capacity: Literal["spot", "on-demand", "spot-then-on-demand"] = "spot"
    """Kind of nodes that the workers run on; spot-then-on-demand: on spot nodes, and while these cannot be had on
    on-demand ones."""
    on_demand_after: Duration = Duration("10m")
    """With spot-then-on-demand: how long a worker waits for a spot node before another takes its place on demand."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of a worker's Ray container; the GPUs are added."""
    service_account_name: str = ""
    """Service account of the pods, for access to object stores by workload identity."""
    pod_template: PodTemplate = Field(default={})
    """Pod template that is merged under what spotune sets: tolerations, node selectors, volumes, environment."""
    resize_cooldown: Duration = Duration("10m")
    """Shortest time between two planned growths of the worker group."""

    @property
    def world_size(self) -> int:
        """Number of worker processes when all pods are there: one per GPU, or one per pod without GPUs."""
        return self.count * max(self.gpus, 1)

    @property
    def min_world_size(self) -> int:
        """Number of worker processes that training goes on with at the least."""
        return self.min * max(self.gpus, 1)

    @model_validator(mode="after")
    def _check_min(self) -> Self:
        if self.min > self.count:
            invalid("min", f"{self.min} is more than count, {self.count}")
        return self


class HeadSpec(Section):
    """The head pod: driver and supervisor, no training."""

    capacity: Literal["spot", "on-demand"] = "on-demand"
    """Kind of node that the head runs on."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of the head's Ray container."""
    pod_template: PodTemplate = Field(default={})
    """Pod template that is merged under what spotune sets."""


class StorageSpec(Section):
    """The shared volume that holds checkpoints, logs and the trained model."""

    storage_class_name: str = ""
    """Storage class with ReadWriteMany; empty: the provider's usual one."""
    size: Quantity = Quantity("200Gi")
    """Size of the volume, such as 200Gi."""
    existing_claim: str = ""
    """Use this PersistentVolumeClaim instead of making one."""
    retain: bool = True
    """Keep the volume when the job is deleted."""


class ClusterSpec(Section):
    """What the Ray cluster is made from."""

    provider: Literal["auto", "aks", "gke", "eks", "none"] = "auto"
    """Cloud whose spot nodes, taints and storage classes are used; auto: from the nodes."""
    image: str = ""
    """Container image of the trainer; empty: the one that belongs to the operator's version."""
    ray_version: str = ""
    """Ray version of the image; empty: the one of the operator's own image."""
    queue_name: str = ""
    """Kueue queue that the job waits in; empty: none."""
