"""What the gateways of a service report at ``/stats``: cumulative counters of each version, and its replicas.

The response is parsed leniently: a gateway may be older or newer than the operator, or another program at its address.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_MAX_VERSIONS: Final = 50
_MAX_BUCKETS: Final = 200
_MAX_REPLICAS: Final = 10_000
_MAX_TEXT_LENGTH: Final = 2000

_TAKES_REQUESTS: Final = frozenset({"RUNNING", "PENDING_MIGRATION"})
"""Ray Serve's states of replicas that have loaded their model and get requests; the latter is on a draining node."""
UNPLACED_SECONDS: Final = 120.0
"""Ray places a replica on a free pod within a second. Its pod has a worker process a few seconds later."""
_RECOVERING: Final = "RECOVERING"
"""Ray Serve's controller has restarted and does not know yet whether the replica runs."""


@dataclass(frozen=True)
class Histogram:
    """A cumulative histogram, as Prometheus has them.

    Attributes:
        buckets: Number of values up to each upper bound; the last bound is infinite.
    """

    buckets: Mapping[float, float] = field(default_factory=dict)

    @property
    def count(self) -> float:
        """Number of values."""
        return max(self.buckets.values(), default=0.0)

    def plus(self, other: Histogram, sign: int = 1) -> Histogram:
        """The sum with another histogram; ``sign`` -1: the difference, without negative counts."""
        bounds = sorted(self.buckets.keys() | other.buckets.keys())
        return Histogram(
            {bound: max(self.buckets.get(bound, 0) + sign * other.buckets.get(bound, 0), 0) for bound in bounds}
        )

    def median(self) -> float | None:
        """The median, by linear interpolation within its bucket (``histogram_quantile``); None without values."""
        if not self.count:
            return None
        rank, lower, below = self.count / 2, 0.0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if count >= rank and count > below:
                return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
            lower, below = bound if not math.isinf(bound) else lower, count
        return lower

    def fraction_above(self, limit: float) -> float:
        """The fraction of the values above a limit, by linear interpolation within its bucket; 0 without values."""
        if not self.count:
            return 0.0
        lower, below = 0.0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if limit < bound:
                within = 0.0 if math.isinf(bound) else (count - below) * (limit - lower) / (bound - lower)
                return 1 - (below + within) / self.count
            lower, below = bound, count
        return 0.0


@dataclass(frozen=True)
class VersionCounters:
    """The counters of one version.

    Attributes:
        requests: Requests that have ended.
        errors: Those of them that failed by the service's fault.
        first_token: Seconds to the first token.
        token: Seconds per token after the first, one value for each request.
    """

    requests: float = 0.0
    errors: float = 0.0
    first_token: Histogram = field(default_factory=Histogram)
    token: Histogram = field(default_factory=Histogram)

    @property
    def error_rate(self) -> float:
        """Fraction of the requests that failed; 0 without requests."""
        return self.errors / self.requests if self.requests else 0.0

    def plus(self, other: VersionCounters, sign: int = 1) -> VersionCounters:
        """The sum with other counters; ``sign`` -1: the difference."""
        return VersionCounters(
            max(self.requests + sign * other.requests, 0.0),
            max(self.errors + sign * other.errors, 0.0),
            self.first_token.plus(other.first_token, sign),
            self.token.plus(other.token, sign),
        )


@dataclass(frozen=True)
class VersionStats:
    """A version in the response of one gateway.

    Attributes:
        weight: Percent of the requests that it gets.
        error: Why the gateway cannot read the model; empty if it can.
        running: Number of running requests.
        counters: Counters since the start of the gateway's process.
    """

    weight: float
    error: str
    running: float
    counters: VersionCounters


@dataclass(frozen=True)
class GatewayStats:
    """The response of a gateway.

    Attributes:
        process: Identifies its process.
        versions: Its versions by name.
        error: Why it does not use the newest list of versions; empty if it does.
        reports_replicas: Whether it reports replicas; one of an older image does not.
        running_replicas: Number of replicas of all versions that take requests; None: Ray Serve does not know now.
        replica_addresses: IP addresses of the pods that have a replica; None: not known, or not reported.
        unplaced_seconds: For how long the replica that waits longest for a pod has done so; 0: all have one.
    """

    process: str
    versions: Mapping[str, VersionStats]
    error: str = ""
    reports_replicas: bool = False
    running_replicas: int | None = None
    replica_addresses: frozenset[str] | None = None
    unplaced_seconds: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """The requests of a service, over all gateways.

    Attributes:
        gateways: The newest response of each gateway.
        polled_at: Unix time of the oldest of these responses.
        error: Why the response of a gateway is missing; empty if all have answered lately.
        since_change: By version, the counters since its weight changed last.
        requests_per_second: Requests that ended per second over the last minute; None if unknown.
        first_token_milliseconds: Median time to the first token over the last minute; None without requests.
        running_replicas: Number of replicas of all versions that take requests; None: unknown since their pods changed.
        no_replica_report: Whether no gateway can tell: none answers, or all have an older image.
    """

    gateways: Sequence[GatewayStats] = ()
    polled_at: float = 0.0
    error: str = "no gateway has answered yet"
    since_change: Mapping[str, VersionCounters] = field(default_factory=dict)
    requests_per_second: float | None = None
    first_token_milliseconds: int | None = None
    running_replicas: int | None = None
    no_replica_report: bool = False

    @property
    def replica_addresses(self) -> frozenset[str] | None:
        """IP addresses of the pods that have a replica, as any gateway knows; None: no gateway knows."""
        known = [found.replica_addresses for found in self.gateways if found.replica_addresses is not None]
        return frozenset().union(*known) if known else None

    @property
    def has_unplaced_replica(self) -> bool:
        """Whether Ray has not placed a replica for much longer than placing takes; no gateway may doubt it."""
        return has_unplaced_replica(self.gateways)

    def of(self, version: str) -> VersionCounters:
        """The counters of a version since its weight changed last."""
        return self.since_change.get(version, VersionCounters())

    def problem(self, version: str) -> str:
        """Why a gateway cannot read the model of a version; empty if all can."""
        return next((found.error for found in self._versions(version) if found.error), "")

    @property
    def list_problem(self) -> str:
        """Why a gateway does not use the newest list of versions; empty if none has a problem with it."""
        return next((gateway.error for gateway in self.gateways if gateway.error), "")

    def lists(self, version: str, weight: float | None = None) -> bool:
        """Whether all gateways know a version, and give it this weight."""
        found = list(self._versions(version))
        is_listed = not self.error and len(found) == len(self.gateways)
        return is_listed and (weight is None or all(each.weight == weight for each in found))

    def has_weight(self, version: str) -> bool:
        """Whether a gateway still gives new requests to a version."""
        return any(found.weight > 0 for found in self._versions(version))

    def running(self, version: str) -> float:
        """Number of running requests of a version."""
        return sum(found.running for found in self._versions(version))

    def _versions(self, version: str) -> Iterable[VersionStats]:
        return (gateway.versions[version] for gateway in self.gateways if version in gateway.versions)


def has_unplaced_replica(gateways: Iterable[GatewayStats]) -> bool:
    """See ``Traffic.has_unplaced_replica``."""
    waited = [found.unplaced_seconds for found in gateways if found.replica_addresses is not None]
    return min(waited, default=0.0) >= UNPLACED_SECONDS


def parse_stats(content: Mapping[str, Any]) -> GatewayStats:
    """The response in a JSON object; never fails."""
    versions = content.get("versions")
    found = versions if isinstance(versions, dict) else {}
    running = _running_replicas(content.get("replicas"))
    return GatewayStats(
        process=str(content.get("process", ""))[:_MAX_TEXT_LENGTH],
        versions={
            name: _version_stats(value)
            for name, value in list(found.items())[:_MAX_VERSIONS]
            if isinstance(value, dict)
        },
        error=_text(content.get("error")),
        reports_replicas="replicas" in content,
        running_replicas=running,
        replica_addresses=_addresses(content.get("replicaAddresses")) if running is not None else None,
        unplaced_seconds=_number(content.get("unplacedSeconds")),
    )


def _addresses(content: Any) -> frozenset[str] | None:
    return frozenset(_text(each) for each in content[:_MAX_REPLICAS]) if isinstance(content, list) else None


def _running_replicas(content: Any) -> int | None:
    """The number of replicas that take requests, from their number by application and state; None if it is unknown."""
    if not isinstance(content, dict):
        return None
    states = [each for each in content.values() if isinstance(each, dict)]
    if any(_number(each.get(_RECOVERING)) for each in states):
        return None
    return sum(int(_number(count)) for each in states for state, count in each.items() if state in _TAKES_REQUESTS)


def _version_stats(content: Mapping[str, Any]) -> VersionStats:
    counters = VersionCounters(
        requests=_number(content.get("requests")),
        errors=_number(content.get("errors")),
        first_token=_histogram(content.get("firstTokenSeconds")),
        token=_histogram(content.get("tokenSeconds")),
    )
    return VersionStats(
        weight=_number(content.get("weight")),
        error=_text(content.get("error")),
        running=_number(content.get("running")),
        counters=counters,
    )


def _histogram(content: Any) -> Histogram:
    buckets = content.get("buckets") if isinstance(content, dict) else None
    if not isinstance(buckets, dict):
        return Histogram()
    bounds = {_bound(name): _number(value) for name, value in list(buckets.items())[:_MAX_BUCKETS]}
    return Histogram({bound: bounds[bound] for bound in sorted(bounds) if not math.isnan(bound)})


def _bound(text: str) -> float:
    try:
        return float(text.replace("+Inf", "inf"))
    except ValueError:
        return math.nan


def _text(value: Any) -> str:
    """The text, limited in length and valid UTF-8; empty if it is none."""
    return value[:_MAX_TEXT_LENGTH].encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _number(value: Any) -> float:
    """The value, if it is a finite number from 0; else 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= sys.float_info.max else 0.0
