"""Prometheus metrics of the gateway, with vLLM's names, so that its dashboards work."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spotune_serve.gateway.metrics.shared_counts import Count, CountFolder, Counts

_LABELS = ("model_name", "model_version")
_REASONS = ("stop", "length", "abort")
_FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_REQUEST_TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
"""vLLM's go up to the maximum length of the model. These fit all models, since processes share their counts."""

_GAUGES = {
    "vllm:num_requests_running": "Sequences that generate tokens.",
    "vllm:num_requests_waiting": "Sequences that wait for their first token.",
    "spotune:requests_running": "Requests that run.",
}
_COUNTERS = {
    "vllm:prompt_tokens": "Tokens of prompts.",
    "vllm:generation_tokens": "Generated tokens.",
    "spotune:stream_resumptions": "Sequences sent to another replica after theirs was lost.",
    "spotune:requests": "Requests that finished, without those of status 4xx.",
    "spotune:request_errors": "Those that failed: status 5xx, or a stream that broke off.",
}
_SUCCESS = "vllm:request_success"
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Time to the first token.", _FIRST_TOKEN_SECONDS),
    "vllm:inter_token_latency_seconds": ("Time between two tokens of a sequence.", _TOKEN_SECONDS),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time between two tokens of a sequence, once per sequence.",
        _TOKEN_SECONDS,
    ),
    "vllm:e2e_request_latency_seconds": ("Time from arrival to last token.", _REQUEST_SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of the prompt, once per finished sequence.", _REQUEST_TOKENS),
    "vllm:request_generation_tokens": ("Generated tokens, once per finished sequence.", _REQUEST_TOKENS),
}


def _offsets() -> tuple[dict[str, int], int]:
    """The first number of each metric in the counts of a version, and how many numbers there are."""
    found: dict[str, int] = {}
    size = 0
    for name, length in [
        *((name, 1) for name in (*_GAUGES, *_COUNTERS)),
        (_SUCCESS, len(_REASONS)),
        # Sum of the values, number of values in each bucket, and of those above the last bound.
        *((name, 2 + len(bounds)) for name, (_text, bounds) in _HISTOGRAMS.items()),
    ]:
        found[name] = size
        size += length
    return found, size


_OFFSETS, _SIZE = _offsets()


class GatewayMetrics(Collector):
    """Counts requests, sequences and tokens of the versions of one model; each answer of a request is a sequence.

    Args:
        model_name: value of the label `model_name`.
        clock: monotonic seconds.
        folder: that the gateway processes of one port share: the metrics are the sums over all of them. None: there is
            one process.

    Attributes:
        process: random id of the process; with a folder, its name, because counts outlive a process.
    """

    def __init__(
        self, model_name: str, clock: Callable[[], float] = time.monotonic, folder: Path | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock
        self.process = uuid.uuid4().hex if folder is None else folder.name
        self._folder = None if folder is None else CountFolder(folder)
        self._model_name = model_name
        self._versions: dict[str, VersionMetrics] = {}
        self.registry.register(self)

    def of(self, version: str) -> VersionMetrics:
        """The metrics of one version; they begin at zero when it is asked for the first time."""
        if version not in self._versions:
            self._versions[version] = VersionMetrics(self.clock, self._folder, version)
        return self._versions[version]

    def drop(self, version: str) -> None:
        """Remove the time series of a version that has left: their number must not grow with each new version."""
        self._versions.pop(version).remove()

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry."""
        totals = {(self._model_name, name): each.totals() for name, each in self._versions.items()}
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for labels, found in totals.items():
                gauge.add_metric(labels, found.value(name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for labels, found in totals.items():
                counter.add_metric(labels, found.value(name))
            yield counter
        success = CounterMetricFamily(
            _SUCCESS, "Sequences by reason: stop, length, or abort by the client.", labels=(*_LABELS, "finished_reason")
        )
        for labels, found in totals.items():
            for index, reason in enumerate(_REASONS):
                success.add_metric((*labels, reason), found.value(_SUCCESS, index))
        yield success
        for name, (text, _bounds) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=_LABELS)
            for labels, found in totals.items():
                counted = found.histogram(name)
                histogram.add_metric(labels, counted.buckets, counted.sum)
            yield histogram

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class VersionMetrics:
    """The metrics of one version.

    Plain numbers: the classes of Prometheus' library are slow for each token, and [decision
    38](docs/adr/0038-gateways-on-one-port.md) says why their sums over processes do not fit.

    Args:
        clock: monotonic seconds.
        folder: see `GatewayMetrics`.
        version: its name.
    """

    def __init__(self, clock: Callable[[], float], folder: CountFolder | None, version: str) -> None:
        counts = Counts(_SIZE, len(_GAUGES), folder, version)
        self._counts = counts
        self.clock = clock
        self.running = Count(counts, _OFFSETS["vllm:num_requests_running"])
        self.waiting = Count(counts, _OFFSETS["vllm:num_requests_waiting"])
        self.running_requests = Count(counts, _OFFSETS["spotune:requests_running"])
        self.prompt_tokens = Count(counts, _OFFSETS["vllm:prompt_tokens"])
        self.generated_tokens = Count(counts, _OFFSETS["vllm:generation_tokens"])
        self.resumptions = Count(counts, _OFFSETS["spotune:stream_resumptions"])
        self.requests = Count(counts, _OFFSETS["spotune:requests"])
        self.request_errors = Count(counts, _OFFSETS["spotune:request_errors"])
        self.finished = {reason: Count(counts, _OFFSETS[_SUCCESS] + index) for index, reason in enumerate(_REASONS)}
        self.first_token_seconds = HistogramCounts(counts, "vllm:time_to_first_token_seconds")
        self.token_seconds = HistogramCounts(counts, "vllm:inter_token_latency_seconds")
        self.mean_token_seconds = HistogramCounts(counts, "vllm:request_time_per_output_token_seconds")
        self.request_seconds = HistogramCounts(counts, "vllm:e2e_request_latency_seconds")
        self.request_prompt_tokens = HistogramCounts(counts, "vllm:request_prompt_tokens")
        self.request_generated_tokens = HistogramCounts(counts, "vllm:request_generation_tokens")

    @property
    def waiting_now(self) -> int:
        """Sequences of all processes that wait for their first token."""
        return int(self._counts.gauge(_OFFSETS["vllm:num_requests_waiting"]))

    def totals(self) -> MetricTotals:
        """The values now, of all processes."""
        return MetricTotals(self._counts.totals())

    def remove(self) -> None:
        """Forget them."""
        self._counts.remove()


class HistogramCounts:
    """A histogram of this process.

    Args:
        counts: of the version.
        name: of the histogram.
    """

    def __init__(self, counts: Counts, name: str) -> None:
        self._own = counts.own
        self._sum = _OFFSETS[name]
        self._first_bucket = self._sum + 1
        self._bounds = _HISTOGRAMS[name][1]

    def observe(self, value: float, count: int = 1) -> None:
        """Count this value, that many times."""
        self._own[self._sum] += value * count
        self._own[self._first_bucket + bisect_left(self._bounds, value)] += count


@dataclass(frozen=True)
class HistogramTotals:
    """A histogram over all processes.

    Attributes:
        sum: of the values.
        buckets: upper bound and number of the values up to it; the last bound is `+Inf`.
    """

    sum: float
    buckets: Sequence[tuple[str, float]]


class MetricTotals:
    """The metrics of one version at one time, over all processes.

    Args:
        values: the sums of the counts.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def value(self, name: str, index: int = 0) -> float:
        """A gauge or a counter."""
        return self._values[_OFFSETS[name] + index]

    def histogram(self, name: str) -> HistogramTotals:
        """A histogram."""
        bounds = [*(str(float(bound)) for bound in _HISTOGRAMS[name][1]), "+Inf"]
        first = _OFFSETS[name] + 1
        counts = accumulate(self._values[first : first + len(bounds)])
        return HistogramTotals(self._values[first - 1], list(zip(bounds, counts, strict=True)))
