"""`/stats`: requests, errors and latencies of each version, for whoever decides between versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from spotune_serve.gateway.backend import Replicas
from spotune_serve.gateway.metrics.gateway_metrics import HistogramTotals
from spotune_serve.gateway.version import Version
from spotune_serve.gateway.versions import Versions


class _Body(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, serialize_by_alias=True)


class LatencyStats(_Body):
    """A cumulative histogram in seconds, as in Prometheus: `buckets` counts by upper bound, the last one `+Inf`."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = {}


class VersionStats(_Body):
    """One version. Counters begin at zero when the gateway starts, or when the version is listed again.

    They are sums over all gateway processes of the port.
    """

    weight: float
    """Relative weight. 0: it gets no new requests, except those that name it."""
    error: str = ""
    """Why the gateway cannot serve the version; empty if it does."""
    running: int = 0
    """Requests now."""
    requests: int = 0
    """Finished requests. Requests with status 4xx do not count."""
    errors: int = 0
    """Finished requests with status 5xx, and streams that broke off."""
    first_token_seconds: LatencyStats = LatencyStats()
    """Time to the first token, for each answer of a request."""
    token_seconds: LatencyStats = LatencyStats()
    """Mean time per output token after the first, for each answer of a request."""


class GatewayStats(_Body):
    """All versions of a gateway."""

    process: str
    """Random id of the gateway process, or of all that share its port; with a new one, all counters began at zero."""
    error: str = ""
    """Why the last list of versions was refused as a whole; empty if it was not."""
    versions: dict[str, VersionStats]
    """By version."""
    replicas: dict[str, dict[str, int]] | None = None
    """Number of replicas by Ray Serve application and state. None: Ray Serve's controller does not answer."""
    replica_addresses: list[str] | None = None
    """IP addresses of the pods that have a replica, loaded or not. None: as `replicas`."""
    unplaced_seconds: float = 0.0
    """For how long the replica that waits longest for a pod has done so. 0: all have one."""


ReplicaReport = Callable[[], Awaitable[Replicas | None]]
"""Returns the replicas; None if they are not known."""


async def no_replicas() -> Replicas | None:
    """The report where Ray Serve does not run."""
    return None


def stats_routes(versions: Versions, replicas: ReplicaReport) -> APIRouter:
    """The route of the statistics."""
    router = APIRouter()

    @router.get("/stats")
    async def report_stats() -> GatewayStats:
        return gateway_stats(versions, await replicas())

    return router


def gateway_stats(versions: Versions, replicas: Replicas | None) -> GatewayStats:
    """The statistics of all versions that are listed, or have running requests; and the replicas."""
    found = {version.name: _stats(version, 0.0) for version in versions.leaving}
    found |= {version.name: _stats(version, weight) for version, weight in versions.listed}
    for name, (weight, error) in versions.unreadable.items():
        # The version may be served still, as it was before its files or arguments changed.
        found[name] = (found.get(name) or VersionStats(weight=weight)).model_copy(update={"error": error})
    stats = GatewayStats(process=versions.process, error=versions.error, versions=found)
    if replicas is not None:
        stats.replicas = {name: dict(each) for name, each in replicas.states.items()}
        stats.replica_addresses = sorted(replicas.addresses)
        stats.unplaced_seconds = round(replicas.unplaced_seconds, 1)
    return stats


def _stats(version: Version, weight: float) -> VersionStats:
    totals = version.metrics.totals()
    return VersionStats(
        weight=weight,
        running=int(totals.value("spotune:requests_running")),
        requests=int(totals.value("spotune:requests")),
        errors=int(totals.value("spotune:request_errors")),
        first_token_seconds=_latency(totals.histogram("vllm:time_to_first_token_seconds")),
        token_seconds=_latency(totals.histogram("vllm:request_time_per_output_token_seconds")),
    )


def _latency(found: HistogramTotals) -> LatencyStats:
    buckets = {bound: int(count) for bound, count in found.buckets}
    return LatencyStats(count=buckets["+Inf"], sum=found.sum, buckets=buckets)
