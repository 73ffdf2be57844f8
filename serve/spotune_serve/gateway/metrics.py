"""Prometheus metrics of the gateway, with vLLM's names, so that its dashboards work."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spotune_serve.gateway.tracing import RequestTrace

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


class GatewayMetrics(Collector):
    """Counts sequences and tokens of the versions of one model; each answer of a request is a sequence.

    Args:
        model_name: value of the label `model_name`.
        clock: monotonic seconds.
    """

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock
        self._model_name = model_name
        self._versions: dict[str, VersionMetrics] = {}
        self._families: list[Gauge | Counter | Histogram] = []

        def gauge(name: str, text: str) -> Gauge:
            self._families.append(found := Gauge(name, text, _LABELS, registry=self.registry))
            return found

        def counter(name: str, text: str) -> Counter:
            self._families.append(found := Counter(name, text, _LABELS, registry=self.registry))
            return found

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            self._families.append(found := Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry))
            return found

        self.running = gauge("vllm:num_requests_running", "Sequences that generate tokens.")
        self.waiting = gauge("vllm:num_requests_waiting", "Sequences that wait for their first token.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.resumptions = counter(
            "spotune:stream_resumptions", "Sequences sent to another replica after theirs was lost."
        )
        self.first_token_seconds = histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN_SECONDS
        )
        self.mean_token_seconds = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between two tokens of a sequence, once per sequence.",
            _TOKEN_SECONDS,
        )
        self.request_seconds = histogram(
            "vllm:e2e_request_latency_seconds", "Time from arrival to last token.", _REQUEST_SECONDS
        )
        self.success = Counter(
            "vllm:request_success",
            "Sequences by reason: stop, length, or abort by the client.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.registry.register(self)

    def of(self, version: str) -> VersionMetrics:
        """The metrics of one version; they begin at zero when it is asked for the first time."""
        if version not in self._versions:
            self._versions[version] = VersionMetrics(self, (self._model_name, version))
        return self._versions[version]

    def drop(self, version: str) -> None:
        """Remove the time series of a version that has left: their number must not grow with each new version."""
        del self._versions[version]
        for family in self._families:
            family.remove(self._model_name, version)
        for reason in _REASONS:
            self.success.remove(self._model_name, version, reason)

    def collect(self) -> Iterator[Metric]:
        """The metrics of tokens, for the registry."""
        generated = CounterMetricFamily("vllm:generation_tokens", "Generated tokens.", labels=_LABELS)
        seconds = HistogramMetricFamily(
            "vllm:time_per_output_token_seconds", "Time between two tokens of a sequence.", labels=_LABELS
        )
        for version, metrics in self._versions.items():
            labels, tokens = (self._model_name, version), metrics.tokens
            generated.add_metric(labels, tokens.generated)
            seconds.add_metric(labels, tokens.buckets(), tokens.sum_seconds)
        yield generated
        yield seconds

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class TokenCounts:
    """The generated tokens of one version. Plain numbers: Prometheus' classes are slow for each token.

    Attributes:
        generated: number of tokens.
        sum_seconds: sum of the times between two tokens of a sequence.
    """

    def __init__(self) -> None:
        self.generated = 0
        self.sum_seconds = 0.0
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)

    def observe(self, seconds: float, count: int) -> None:
        """Count tokens that came this long after the token before them."""
        self.sum_seconds += seconds * count
        self._counts[bisect_left(_TOKEN_SECONDS, seconds)] += count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        names = [str(float(bound)) for bound in _TOKEN_SECONDS]
        return list(zip([*names, "+Inf"], accumulate(self._counts), strict=True))


class VersionMetrics:
    """The metrics of one version.

    Args:
        metrics: of the gateway.
        labels: values of `model_name` and `model_version`.
    """

    def __init__(self, metrics: GatewayMetrics, labels: tuple[str, str]) -> None:
        self.clock = metrics.clock
        self.tokens = TokenCounts()
        self.waiting_now = 0
        self.running = metrics.running.labels(*labels)
        self.waiting = metrics.waiting.labels(*labels)
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.resumptions = metrics.resumptions.labels(*labels)
        self.first_token_seconds = metrics.first_token_seconds.labels(*labels)
        self.mean_token_seconds = metrics.mean_token_seconds.labels(*labels)
        self.request_seconds = metrics.request_seconds.labels(*labels)
        self.finished = {reason: metrics.success.labels(*labels, reason) for reason in _REASONS}


class SequenceTimer:
    """Follows one sequence: waiting, running, finished.

    Args:
        metrics: of the version.
        trace: of the request; None if it is not traced.
        answer: index of the answer in the request.
    """

    def __init__(self, metrics: VersionMetrics, trace: RequestTrace | None = None, answer: int = 0) -> None:
        self._metrics = metrics
        self._trace = trace
        self._answer = answer
        self._num_tokens = 0
        self._start = metrics.clock()
        self._first_token = 0.0
        self._num_first_tokens = 0
        self._last_token: float | None = None
        self._finished = False
        metrics.waiting_now += 1
        metrics.waiting.inc()

    def add_tokens(self, count: int) -> None:
        """Count tokens that arrived together."""
        if not count:
            return
        metrics = self._metrics
        now = metrics.clock()
        if self._last_token is None:
            self._leave_queue()
            metrics.running.inc()
            metrics.first_token_seconds.observe(now - self._start)
            self._first_token, self._num_first_tokens = now, count
            if self._trace is not None:
                self._trace.add_first_token(self._answer)
        else:
            metrics.tokens.observe((now - self._last_token) / count, count)
        self._last_token = now
        self._num_tokens += count
        metrics.tokens.generated += count

    def add_resumption(self) -> None:
        """Count that the sequence is sent to another replica."""
        self._metrics.resumptions.inc()
        if self._trace is not None:
            self._trace.add_resumption(self._answer, self._num_tokens)

    def finish(self, reason: str | None) -> None:
        """The sequence finished: `stop`, `length` or `abort`; None after an error. Only the first call counts."""
        metrics = self._metrics
        if self._finished:
            return
        self._finished = True
        if self._last_token is None:
            self._leave_queue()
        else:
            metrics.running.dec()
            num_later_tokens = self._num_tokens - self._num_first_tokens
            if num_later_tokens:
                metrics.mean_token_seconds.observe((self._last_token - self._first_token) / num_later_tokens)
        if reason is not None:
            metrics.finished[reason].inc()
            metrics.request_seconds.observe(metrics.clock() - self._start)
        if self._trace is not None:
            self._trace.finish(self._answer, self._num_tokens, reason)

    def _leave_queue(self) -> None:
        self._metrics.waiting_now -= 1
        self._metrics.waiting.dec()
