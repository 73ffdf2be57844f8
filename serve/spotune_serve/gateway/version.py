"""One version of the model: how the gateway prompts it, where its replicas are, and how its requests end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spotune_serve.gateway.answers import Answerer
from spotune_serve.gateway.backend import Backend, VersionGoneError
from spotune_serve.gateway.metrics.gateway_metrics import VersionMetrics
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.waiting import Waiters


@dataclass(frozen=True)
class VersionSource:
    """A version that the gateway is told to serve.

    Attributes:
        name: the version.
        weight: its part of the requests, relative to the weights of the others. 0: only requests that name it.
        identity: the same version with another identity is read again.
        load: reads tokenizer and prompt, in a thread; raises an error with one line for the status.
        backend: its replicas.
    """

    name: str
    weight: float
    identity: Hashable
    load: Callable[[], ServedModel]
    backend: Backend


class RequestCounts:
    """Counts the requests of a version.

    Args:
        metrics: of the version.
    """

    def __init__(self, metrics: VersionMetrics) -> None:
        self._metrics = metrics

    @property
    def running(self) -> int:
        """Requests of this process now."""
        return int(self._metrics.running_requests.value)

    @contextmanager
    def count_running(self) -> Iterator[None]:
        """Count a request as running."""
        self._metrics.running_requests.inc()
        try:
            yield
        finally:
            self._metrics.running_requests.dec()

    def finish(self, *, failed: bool = False) -> None:
        """Count a request that was answered, failed, or was left by its client after the first token.

        Requests that the client got wrong (status 4xx) do not count.

        Args:
            failed: status 5xx, or a stream that broke off.
        """
        self._metrics.requests.inc()
        self._metrics.request_errors.inc(failed)


@dataclass(eq=False)
class Version:
    """A version that the gateway serves.

    Attributes:
        name: the version.
        identity: see `VersionSource`.
        model: how to prompt it.
        backend: its replicas.
        answerer: generates with them.
        metrics: its Prometheus metrics.
        counts: its requests.
        waiters: those of them without a token.
    """

    name: str
    identity: Hashable
    model: ServedModel
    backend: Backend
    answerer: Answerer
    metrics: VersionMetrics
    counts: RequestCounts = field(init=False)
    waiters: Waiters = field(init=False)

    def __post_init__(self) -> None:
        self.counts = RequestCounts(self.metrics)
        self.waiters = Waiters(self.gone)

    def gone(self) -> VersionGoneError:
        """The error that says that the version is gone."""
        return VersionGoneError(f"version {self.name} is not deployed")
