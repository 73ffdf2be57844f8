"""Reconcile workers on their real queue, with reconciles that a test controls."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from spotune_operator.errors import KubernetesError
from spotune_operator.kube.client import ConflictError
from spotune_operator.runtime.logs import JsonFormatter
from spotune_operator.runtime.metrics import Metrics
from spotune_operator.runtime.workers import ReconcileWorkers
from spotune_operator.settings import Settings

KEY, OTHER = ("team", "a"), ("team", "b")
SETTINGS = Settings(debounce_seconds=0.0, retry_seconds=0.001, retry_max_seconds=0.004)


@dataclass
class Reconciles:
    """What reconciles do, in turn.

    Attributes:
        results: What the next reconciles return or raise; then they return None.
        done: The keys so far.
        held: While it is not set, reconciles wait.
    """

    results: list[float | Exception | None] = field(default_factory=list)
    done: list[tuple[str, str]] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0

    async def __call__(self, key: tuple[str, str]) -> float | None:
        self.running += 1
        await self.held.wait()
        self.running -= 1
        self.done.append(key)
        result = self.results.pop(0) if self.results else None
        if isinstance(result, Exception):
            raise result
        return result


async def wait_for(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - workers do not tell what they did
            await asyncio.sleep(0.001)


@dataclass
class Bench:
    """Running workers."""

    workers: ReconcileWorkers
    reconciles: Reconciles
    metrics: Metrics

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def working(
    test: Callable[[Bench], Coroutine[Any, Any, None]],
    *results: float | Exception | None,
    kind: Any = "job",
    held: bool = False,
) -> Bench:
    """Run a test beside two workers."""

    async def main() -> Bench:
        metrics = Metrics()
        bench = Bench(ReconcileWorkers(kind, SETTINGS, metrics), Reconciles(list(results)), metrics)
        if not held:
            bench.reconciles.held.set()
        async with running(bench):
            await test(bench)
        return bench

    return asyncio.run(main())


@asynccontextmanager
async def running(bench: Bench) -> Any:
    tasks = [asyncio.create_task(bench.workers.run(bench.reconciles)) for _ in range(2)]
    try:
        yield
        assert not any(task.done() for task in tasks), "a worker ended"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The operator's log, as it is written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("spotune_operator.runtime.workers")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def test_key_is_reconciled_once_and_measured() -> None:
    async def test(bench: Bench) -> None:
        bench.workers.enqueue(KEY)
        bench.workers.enqueue(KEY)
        await wait_for(lambda: bench.value("spotune_operator_reconcile_seconds_count") == 1)
        assert bench.reconciles.done == [KEY]

    bench = working(test)
    assert bench.value("spotune_operator_reconciles_total", result="error") is None


def test_result_says_when_the_next_reconcile_is() -> None:
    async def test(bench: Bench) -> None:
        bench.workers.enqueue(KEY)
        await wait_for(lambda: bench.reconciles.done == [KEY, KEY, KEY])

    working(test, 0.0, 0.001, None)


@pytest.mark.parametrize("kind", ["job", "service"])
def test_reconcile_that_the_api_server_fails_is_retried_and_logged_with_its_object(kind: str, log: io.StringIO) -> None:
    async def test(bench: Bench) -> None:
        bench.workers.enqueue(KEY)
        await wait_for(lambda: len(bench.reconciles.done) == 3)
        await wait_for(lambda: bench.value("spotune_operator_reconcile_seconds_count") == 3)

    bench = working(test, KubernetesError("etcd leader changed"), KubernetesError("etcd leader changed"), kind=kind)
    assert bench.value("spotune_operator_reconciles_total", result="error") == 2
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    message = "reconcile failed: etcd leader changed; retrying in 0 s"
    assert [(line["level"], line["message"], line["namespace"], line[kind]) for line in lines] == [
        ("warning", message, "team", "a")
    ] * 2


def test_reconcile_of_an_object_that_has_changed_meanwhile_is_repeated_and_is_no_error() -> None:
    async def test(bench: Bench) -> None:
        bench.workers.enqueue(KEY)
        await wait_for(lambda: bench.reconciles.done == [KEY, KEY])

    bench = working(test, ConflictError("the object has been modified", 409))
    assert bench.value("spotune_operator_reconciles_total", result="conflict") == 1
    assert bench.value("spotune_operator_reconciles_total", result="error") is None


def test_bug_in_one_reconcile_stops_neither_the_worker_nor_its_retry(log: io.StringIO) -> None:
    async def test(bench: Bench) -> None:
        bench.workers.enqueue(KEY)
        await wait_for(lambda: bench.reconciles.done == [KEY, KEY])

    bench = working(test, ZeroDivisionError("of a bug"))
    assert bench.value("spotune_operator_reconciles_total", result="error") == 1
    (line,) = [json.loads(line) for line in log.getvalue().splitlines()]
    assert line["message"] == "reconcile failed with a bug of the operator; retrying in 0 s"
    assert line["traceback"].endswith("ZeroDivisionError: of a bug")


def test_object_has_one_reconcile_at_a_time_and_others_run_beside_it() -> None:
    async def test(bench: Bench) -> None:
        bench.workers.enqueue(KEY)
        await wait_for(lambda: bench.reconciles.running == 1)
        bench.workers.enqueue(KEY)
        bench.workers.enqueue(OTHER)
        await wait_for(lambda: bench.reconciles.running == 2)
        bench.reconciles.held.set()
        await wait_for(lambda: sorted(bench.reconciles.done) == [KEY, KEY, OTHER])

    working(test, held=True)


def test_number_of_waiting_objects_does_not_count_those_in_work() -> None:
    async def test(bench: Bench) -> None:
        for number in range(5):
            bench.workers.enqueue(("team", str(number)))
        await wait_for(lambda: bench.reconciles.running == 2)
        await wait_for(lambda: len(bench.workers) == 3)
        bench.reconciles.held.set()
        await wait_for(lambda: len(bench.workers) == 0 and len(bench.reconciles.done) == 5)

    working(test, held=True)


def test_hung_reconcile_is_named_until_it_ends() -> None:
    async def test(bench: Bench) -> None:
        assert bench.workers.hung(0.0) == []
        bench.workers.enqueue(KEY)
        await wait_for(lambda: bench.workers.hung(0.0) == [KEY])
        assert bench.workers.hung(3600.0) == []
        bench.reconciles.held.set()
        await wait_for(lambda: bench.workers.hung(0.0) == [])

    working(test, held=True)
