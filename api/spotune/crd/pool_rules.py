"""CEL rules of `workers.pools`, as `spotune.job.pools` checks them in files."""

from typing import Final

from spotune.crd.cel_rules import Rule
from spotune.job.pools import RESERVED_NAMES, ZONE_LABEL

POOL_RULES: Final = (
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
        "self.pools.map(pool, pool.max).sum() >= self.min",
        "carry fewer pods at most (the sum of max) than min: raise max",
        "pools",
    ),
)
