"""`/stats`: requests, errors and latencies of each version, for whoever decides between versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from prometheus_client import Histogram
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from spotune_serve.gateway.backend import StatesByApplication
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
    """One version. Counters begin at zero when the gateway starts, or when the version is listed again."""

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
    """All versions of one gateway process."""

    process: str
    """Random id of the process; with a new one, all counters began at zero."""
    error: str = ""
    """Why the last list of versions was refused as a whole; empty if it was not."""
    versions: dict[str, VersionStats]
    """By version."""
    replicas: dict[str, dict[str, int]] | None = None
    """Number of replicas by Ray Serve application and state. None: Ray Serve's controller does not answer."""


ReplicaReport = Callable[[], Awaitable[StatesByApplication | None]]
"""Returns the number of replicas by application and state; None if it is not known."""


async def no_replicas() -> StatesByApplication | None:
    """The report where Ray Serve does not run."""
    return None


def stats_routes(versions: Versions, replicas: ReplicaReport) -> APIRouter:
    """The route of the statistics."""
    router = APIRouter()

    @router.get("/stats")
    async def report_stats() -> GatewayStats:
        return gateway_stats(versions, await replicas())

    return router


def gateway_stats(versions: Versions, replicas: StatesByApplication | None) -> GatewayStats:
    """The statistics of all versions that are listed, or have running requests; and the replicas."""
    found = {version.name: _stats(version, 0.0) for version in versions.leaving}
    found |= {version.name: _stats(version, weight) for version, weight in versions.listed}
    for name, (weight, error) in versions.unreadable.items():
        # The version may be served still, as it was before its files or arguments changed.
        found[name] = (found.get(name) or VersionStats(weight=weight)).model_copy(update={"error": error})
    states = {name: dict(each) for name, each in replicas.items()} if replicas is not None else None
    return GatewayStats(process=versions.process, error=versions.error, versions=found, replicas=states)


def _stats(version: Version, weight: float) -> VersionStats:
    counts = version.counts
    return VersionStats(
        weight=weight,
        running=counts.running,
        requests=counts.finished,
        errors=counts.errors,
        first_token_seconds=_latency(version.metrics.first_token_seconds),
        token_seconds=_latency(version.metrics.mean_token_seconds),
    )


def _latency(histogram: Histogram) -> LatencyStats:
    samples: list[Any] = [sample for metric in histogram.collect() for sample in metric.samples]
    total = sum(sample.value for sample in samples if sample.name.endswith("_sum"))
    buckets = {sample.labels["le"]: int(sample.value) for sample in samples if sample.name.endswith("_bucket")}
    return LatencyStats(count=max(buckets.values()), sum=total, buckets=buckets)
