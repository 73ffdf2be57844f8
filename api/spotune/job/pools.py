"""The pools of nodes that may carry workers, cheapest first, and what the status says of them."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from spotune.custom_resource.base import PositiveDuration, PositiveInt, Section, invalid
from spotune.custom_resource.metadata import NAME_PATTERN, DnsLabel, LabelKey, LabelValue
from spotune.custom_resource.status import StatusSection, Timestamp
from spotune.units.money import Money, Price

MAX_POOLS: Final = 16
"""Kubernetes requires a bound for rules that compare each pool with each other."""
MAX_POOL_NAME: Final = 30
"""KubeRay puts the name into the names of pods."""
MAX_SELECTOR_LABELS: Final = 8
ZONE_LABEL: Final = "topology.kubernetes.io/zone"
MAX_QUEUED_POOLS: Final = 7
"""Kueue's webhook for RayClusters refuses more: a Workload has eight pod sets, and one is the head's."""
TOO_MANY_POOLS: Final = f"Kueue takes {MAX_QUEUED_POOLS} pools at most: remove some, or cluster.queueName"
RESERVED_NAMES: Final = ("head", "headgroup")
"""Names of the head's group: KubeRay's, and that of Kueue's pod set."""

GPU_TYPE_RESOURCE: Final = "spotune-gpu-type:"
"""Beginning of the name of the resource by which a node of Ray says the GPU type of its pool."""


def _check_pool_name(name: str) -> str:
    if name in RESERVED_NAMES:
        invalid("", f"{name!r} is the head's group: choose another name")
    if len(name) > MAX_POOL_NAME:
        invalid("", f"{name!r} has {len(name)} characters; at most {MAX_POOL_NAME} are allowed, for names of pods")
    return name


_NAME_SCHEMA = WithJsonSchema({"type": "string", "maxLength": MAX_POOL_NAME, "pattern": f"^{NAME_PATTERN}$"})


class PoolSpec(Section):
    """Nodes of one kind that may carry workers."""

    name: Annotated[str, DnsLabel, AfterValidator(_check_pool_name), _NAME_SCHEMA]
    """Name of the pool, and of its worker group in the RayCluster: a-z, 0-9 and -, at most 30 characters."""
    capacity: Literal["spot", "on-demand"] = "spot"
    """Kind of the nodes."""
    zone: LabelValue = ""
    """Zone of the nodes (topology.kubernetes.io/zone). Empty: any."""
    gpu_type: LabelValue = ""
    """GPU of the nodes, as their label names it: cloud.google.com/gke-accelerator on GKE, instance-gpu-name of
    Karpenter or Auto Mode on EKS, else nvidia.com/gpu.product. Empty: any."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=MAX_SELECTOR_LABELS)] = Field(default={})
    """More labels that the nodes must have."""
    price: Price | None = None
    """Price of a node and hour with its currency, such as 2.10 USD. If every pool has one, the cheapest comes first;
    otherwise the order of the list decides."""
    max: PositiveInt | None = None
    """Maximum number of pods in this pool. Default: workers.count."""
    after: PositiveDuration | None = None
    """How long a worker waits for a node here before the next pool is tried. Default: workers.poolPatience."""

    @property
    def labels(self) -> dict[str, str]:
        """Labels that a node of the pool has, but for those of its capacity and GPU type."""
        return {**self.node_selector, **({ZONE_LABEL: self.zone} if self.zone else {})}

    @property
    def place(self) -> tuple[object, ...]:
        """What the nodes are chosen by: equal for two pools that overlap entirely."""
        return self.capacity, self.gpu_type, tuple(sorted(self.labels.items()))


Pools = Annotated[
    list[PoolSpec],
    Field(
        max_length=MAX_POOLS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
]
"""The pools in the order of the job file."""


def cheapest_first(pools: Sequence[PoolSpec]) -> list[PoolSpec]:
    """The pools in the order in which they are tried: by price if each has one, else as they are listed."""
    if any(pool.price is None for pool in pools):
        return list(pools)
    return sorted(pools, key=lambda pool: pool.price.amount if pool.price is not None else 0.0)


def check_pools(pools: Sequence[PoolSpec], count: int, minimum: int) -> None:
    """Refuse pools that contradict each other, or have too few pods.

    Args:
        pools: In the order of the job file.
        count: ``workers.count``.
        minimum: The least number of pods.

    Raises:
        PydanticCustomError: With the field and the remedy.
    """
    for index, pool in enumerate(pools):
        _check_pool(pool, f"pools[{index}]", pools[:index])
    most = sum(pool.max or count for pool in pools)
    if pools and most < minimum:
        invalid("pools", f"carry {most} pods at most (the sum of max), fewer than min, {minimum}: raise max")


def _check_pool(pool: PoolSpec, field: str, before: Sequence[PoolSpec]) -> None:
    """Compare a pool with those before it in the list."""
    if pool.zone and pool.node_selector.get(ZONE_LABEL, pool.zone) != pool.zone:
        invalid(f"{field}.zone", f"contradicts nodeSelector, which has another {ZONE_LABEL}: remove one of them")
    for other in before:
        if pool.name == other.name:
            invalid(f"{field}.name", f"{pool.name!r} is the name of two pools: rename one of them")
        if pool.place == other.place:
            invalid(
                field,
                f"{pool.name} overlaps {other.name}: both have the same nodes (capacity, zone, gpuType and "
                "nodeSelector): remove one of them, or give it a selector of its own",
            )
        if pool.price is not None and other.price is not None and pool.price.currency != other.price.currency:
            invalid(
                f"{field}.price",
                f"{pool.price} and {other.price} of pool {other.name} have different currencies: use one for all pools",
            )


def check_queue_and_limit(pools: Sequence[PoolSpec], queue_name: str, max_cost: Money | None) -> None:
    """Refuse pools that do not fit a queue, and a limit of cost that has no effect with their prices.

    Args:
        pools: ``workers.pools``.
        queue_name: ``cluster.queueName``.
        max_cost: ``maxCost``.

    Raises:
        PydanticCustomError: With the field and the remedy.
    """
    if queue_name and len(pools) > MAX_QUEUED_POOLS:
        invalid("workers.pools", TOO_MANY_POOLS)
    for pool in pools:
        if max_cost is not None and pool.price is not None and pool.price.currency != max_cost.currency:
            other = f"{max_cost} has another currency than pool {pool.name}, {pool.price}"
            invalid("maxCost", f"{other}: use one for both")


class PoolStatus(StatusSection):
    """The workers in one pool, and what is remembered of it."""

    name: str
    """Name of the pool."""
    running: int = 0
    """Running workers."""
    pending: int = 0
    """Workers that wait for a node, or start on one."""
    refusals: int = 0
    """How often in a row no node came in time."""
    refused_at: Timestamp | None = None
    """Time of the last refusal (RFC 3339)."""
    retry_at: Timestamp | None = None
    """Time before which the pool is left alone while other pools carry all workers (RFC 3339)."""
    price: str = ""
    """Price of a node and hour; empty if it is not known."""
    node_seconds: float = 0
    """Seconds of its nodes that ran workers, whether these trained or not: the time that a cloud bills."""
    leaving: list[str] = Field(default=[])
    """Names of worker pods that are being removed from the pool."""
