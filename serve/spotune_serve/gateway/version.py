"""One version of the model: how the gateway prompts it, where its replicas are, and how its requests end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from spotune_serve.gateway.answers import Answerer
from spotune_serve.gateway.backend import Backend, VersionGoneError
from spotune_serve.gateway.metrics import VersionMetrics
from spotune_serve.gateway.served_model import ServedModel


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


@dataclass
class RequestCounts:
    """Requests of a version since the start of the gateway.

    Attributes:
        running: requests now.
        finished: answered, failed, or left by their client after the first token. Requests that the client got wrong
            (status 4xx) do not count.
        errors: those of `finished` that failed: status 5xx, or a stream that broke off.
    """

    running: int = 0
    finished: int = 0
    errors: int = 0

    @contextmanager
    def count_running(self) -> Iterator[None]:
        """Count a request as running."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def finish(self, *, failed: bool = False) -> None:
        """Count a request that has ended."""
        self.finished += 1
        self.errors += failed


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
    """

    name: str
    identity: Hashable
    model: ServedModel
    backend: Backend
    answerer: Answerer
    metrics: VersionMetrics
    counts: RequestCounts = field(default_factory=RequestCounts)
    _waiting: set[asyncio.Timeout] = field(default_factory=set)

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None, None]:
        """A request waits for its first token here.

        Raises:
            VersionGoneError: `abandon` ended the wait.
        """
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waiting.add(wait)
                try:
                    yield
                finally:
                    self._waiting.discard(wait)
        except TimeoutError as error:
            if wait.expired():
                raise self.gone() from error
            raise

    def abandon(self) -> None:
        """End the wait of all requests without a token, so that another version takes them."""
        now = asyncio.get_running_loop().time()
        for wait in self._waiting:
            if not wait.expired():
                wait.reschedule(now)

    def gone(self) -> VersionGoneError:
        """The error that says that the version is gone."""
        return VersionGoneError(f"version {self.name} is not served any more")
