"""CEL rules of pools, queues and limits, as `spotune.job` checks them in files.

The API server lets through what CEL would be too slow for: a zone and a selector of the same zone in two pools, and
names of labels in a selector. The models refuse these, so such a job becomes `Stalled` before it has pods.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import BaseModel

from spotune.crd.cel_rules import Rule
from spotune.job import ClusterSpec, PoolSpec
from spotune.job.lifecycle import TTL_WITH_SERVING
from spotune.job.pools import MAX_POOLS, MAX_QUEUED_POOLS, RESERVED_NAMES, TOO_MANY_POOLS, ZONE_LABEL

_POOL: Final = (
    Rule(f"!(self.name in {[*RESERVED_NAMES]})", "is the head's group: choose another name", "name"),
    Rule(
        f"self.zone == '' || !('{ZONE_LABEL}' in self.nodeSelector) || self.nodeSelector['{ZONE_LABEL}'] == self.zone",
        f"contradicts nodeSelector, which has another {ZONE_LABEL}: remove one of them",
        "zone",
    ),
)
_SAME_PLACE: Final = (
    "a.capacity == b.capacity && a.zone == b.zone && a.gpuType == b.gpuType && a.nodeSelector == b.nodeSelector"
)
_SUM_OF_MAX: Final = " + ".join(
    f"(self.pools.size() > {index} ? self.pools[{index}].max : 0)" for index in range(MAX_POOLS)
)
"""Without `sum()`: Kubernetes 1.29 does not know how long the list of a `map()` is, and refuses the definition."""
WORKERS_RULES: Final = (
    Rule(
        "self.pools.size() == 0 || self.capacity == 'spot'",
        "pools have a capacity each: remove workers.capacity, and set capacity of each pool",
        "capacity",
    ),
    Rule(
        "self.pools.size() == 0 || self.onDemandAfter == '10m'",
        "is not used with pools: remove it, and set poolPatience",
        "onDemandAfter",
    ),
    Rule(
        "self.pools.size() > 0 || self.poolPatience == '10m'",
        "is only used with pools: remove it, or set pools",
        "poolPatience",
    ),
    Rule(
        "self.pools.size() > 0 || !self.mixGpuTypes", "is only used with pools: remove it, or set pools", "mixGpuTypes"
    ),
    Rule(
        f"self.pools.all(a, self.pools.exists_one(b, {_SAME_PLACE}))",
        "two pools have the same nodes (capacity, zone, gpuType and nodeSelector): remove one of them",
        "pools",
    ),
    Rule(
        "self.pools.all(a, !has(a.price) || self.pools.all(b, !has(b.price) || "
        "a.price.substring(a.price.size() - 3) == b.price.substring(b.price.size() - 3)))",
        "prices have different currencies: use one for all pools",
        "pools",
    ),
    Rule(
        "self.pools.size() == 0 || self.pools.exists(pool, !has(pool.max)) || type(self.min) != int || "
        f"{_SUM_OF_MAX} >= self.min",
        "carry fewer pods at most (the sum of max) than min: raise max",
        "pools",
    ),
)
_CLUSTER: Final = (
    Rule(
        "self.queuePriorityClass == '' || self.queueName != ''",
        "is only used with queueName: remove it, or set queueName",
        "queuePriorityClass",
    ),
)
LIMIT_RULES: Final = (
    Rule("!has(self.ttlSecondsAfterFinished) || !has(self.serving)", TTL_WITH_SERVING, "ttlSecondsAfterFinished"),
    Rule(
        f"self.cluster.queueName == '' || self.workers.pools.size() <= {MAX_QUEUED_POOLS}",
        TOO_MANY_POOLS,
        "workers.pools",
    ),
    Rule(
        "!has(self.maxCost) || self.workers.pools.all(pool, !has(pool.price) || "
        "pool.price.substring(pool.price.size() - 3) == self.maxCost.substring(self.maxCost.size() - 3))",
        "has another currency than prices of pools: use one for both",
        "maxCost",
    ),
)
"""Rules of the spec of a job."""
SUPPLY_RULES: Final[Mapping[type[BaseModel], Sequence[Rule]]] = {PoolSpec: _POOL, ClusterSpec: _CLUSTER}
"""Rules of the sections for pools and queues."""
