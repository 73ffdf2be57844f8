"""Where a job runs: pods and the Ray cluster. `spotune run` reads workers.count, min and gpus only."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spotune.custom_resource.base import NonNegativeInt, PositiveDuration, PositiveInt, Section, expecting, invalid
from spotune.custom_resource.metadata import LabelValue
from spotune.custom_resource.pods import PodTemplate, ResourcesSpec
from spotune.job.node_health import NodeCheck, OnStraggler
from spotune.job.pools import Pools, check_pools
from spotune.units.durations import Duration


class WorkersSpec(Section):
    """The worker pods. Each GPU runs one worker process."""

    count: PositiveInt = 1
    """Number of worker pods. `spotune run` starts one local process per GPU of these pods."""
    min: Annotated[Literal["auto"] | PositiveInt, expecting("auto or a whole number from 1")] = "auto"
    """Minimum number of pods. Training continues with this many while more are not available. auto: the smallest number
    on which the model fits; it is determined at the first start, from the memory of a worker."""
    gpus: NonNegativeInt = 1
    """GPUs per pod. 0: one CPU worker per pod."""
    capacity: Literal["spot", "on-demand", "spot-then-on-demand"] = "spot"
    """Kind of nodes for the workers. spot-then-on-demand: spot nodes, and on-demand nodes while no spot nodes are
    available."""
    on_demand_after: Duration = Duration("10m")
    """With spot-then-on-demand: how long a worker waits for a spot node before an on-demand worker replaces it."""
    pools: Pools = Field(default=[])
    """Pools of nodes that may carry workers, instead of capacity. The cheapest with room carries them, and a better one
    takes over when it has room again, without a lost step."""
    pool_patience: PositiveDuration = Duration("10m")
    """With pools: how long a worker waits for a node of a pool before the next pool is tried."""
    mix_gpu_types: bool = False
    """With pools: whether one worker group may have GPUs of several types. Other GPUs round differently, so a change of
    the mixture changes the last bits of the weights."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of a worker's Ray container. The GPUs are added automatically."""
    service_account_name: str = ""
    """Service account of the pods, for access to object stores through workload identity."""
    pod_template: PodTemplate = Field(default={})
    """Pod template for tolerations, node selectors, volumes and environment variables. Fields that spotune sets win."""
    resize_cooldown: Duration = Duration("10m")
    """Minimum time between two planned resizes that add workers."""
    node_check: NodeCheck = "auto"
    """Whether nodes are checked before they are used. auto: nodes with GPUs of a cluster. always: also nodes for CPU
    workers, and the machine of `spotune run`."""
    on_straggler: OnStraggler = "report"
    """What happens if a worker takes over 1.2 times as long as the median for 5 minutes and 20 steps. replace: the
    workers commit and continue without its node, at most once per resizeCooldown and never with fewer than min."""

    @property
    def world_size(self) -> int:
        """Number of worker processes when all pods run: one per GPU, or one per pod without GPUs."""
        return self.count * max(self.gpus, 1)

    @property
    def min_count(self) -> int:
        """Minimum number of pods, without regard to the memory that the model needs: 1 for auto."""
        return 1 if self.min == "auto" else self.min

    @property
    def min_world_size(self) -> int:
        """Number of worker processes in `min_count` pods."""
        return self.min_count * max(self.gpus, 1)

    @property
    def world_sizes(self) -> range:
        """Numbers of worker processes in whole pods, from `min_world_size` to `world_size`."""
        return range(self.min_world_size, self.world_size + 1, max(self.gpus, 1))

    @model_validator(mode="after")
    def _check_min(self) -> Self:
        if self.min_count > self.count:
            invalid("min", f"{self.min} is more than count, {self.count}")
        if self.on_straggler == "replace" and self.min_count == self.count:
            invalid(
                "onStraggler", "replace needs a min below count: otherwise no worker can be left out; lower workers.min"
            )
        check_pools(self.pools, self.count, self.min_count)
        return self

    @model_validator(mode="after")
    def _check_fields_beside_pools(self) -> Self:
        if not self.pools and self.mix_gpu_types:
            invalid("mixGpuTypes", "is only used with pools: remove it, or set pools")
        if self.pools and self.capacity != "spot":
            invalid("capacity", "pools have a capacity each: remove workers.capacity, and set capacity of each pool")
        if self.pools and self.on_demand_after != type(self).model_fields["on_demand_after"].default:
            invalid("onDemandAfter", "is not used with pools: remove it, and set poolPatience")
        if not self.pools and self.pool_patience != type(self).model_fields["pool_patience"].default:
            invalid("poolPatience", "is only used with pools: remove it, or set pools")
        return self


class HeadSpec(Section):
    """The head pod. It runs the driver and the supervisor, and does no training."""

    capacity: Literal["spot", "on-demand"] = "on-demand"
    """Kind of node for the head."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of the head's Ray container."""
    pod_template: PodTemplate = Field(default={})
    """Pod template for the head. Fields that spotune sets win."""


class ClusterSpec(Section):
    """Settings of the Ray cluster."""

    provider: Literal["auto", "aks", "gke", "eks", "none"] = "auto"
    """Cloud provider, which determines spot labels, taints and storage classes. auto: detected from the nodes."""
    image: str = ""
    """Container image of the trainer. Empty: the image of the operator's version."""
    ray_version: str = ""
    """Ray version of the image. Empty: the version in the operator's default image."""
    queue_name: LabelValue = ""
    """LocalQueue of Kueue to submit the job to. Empty: no queue."""
    queue_priority_class: LabelValue = ""
    """WorkloadPriorityClass of the job in the queue. Empty: the default priority."""

    @model_validator(mode="after")
    def _check_priority(self) -> Self:
        if self.queue_priority_class and not self.queue_name:
            invalid("queuePriorityClass", "is only used with queueName: remove it, or set queueName")
        return self
