"""The number of replicas follows the load on a real Kubernetes: Ray Serve's autoscaling and Ray's autoscaler."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from spotune_testcluster.waiting import wait_for
from tests.cluster.finetune_jobs import Workplace
from tests.cluster.model_services import RunningService, add_model, running_service, service_manifest
from tests.cluster.operator_install import Operator
from tests.serve.support.openai_streams import STREAMS, stream

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

NAME = "scaled"
MAX = 3
_CLIENTS = 12
_SECONDS_TO_SCALE = 600.0


@pytest.fixture(scope="module")
def service(operator: Operator, workplace: Workplace) -> Iterator[RunningService]:
    add_model(workplace)
    replicas = {"min": 0, "max": MAX, "targetOngoingRequests": 2, "scaleDownDelay": "20s"}
    with (
        operator.with_values("serving.enabled=true"),
        running_service(workplace, service_manifest(workplace, NAME, replicas=replicas)) as found,
    ):
        found.wait_until_ready(replicas=1)
        yield found


def test_replicas_follow_the_load_down_to_zero_and_back(service: RunningService) -> None:
    """From 1 to 3 under load, to 0 without, and to 1 for a request that waits for it."""
    with service.client() as client:
        with _load(client):
            _wait_for_replicas(service, MAX)
        _wait_for_replicas(service, 0)
        assert service.condition("Ready")["status"] == "True", "the endpoint takes requests"
        assert stream(client, NAME, 0)
        _wait_for_replicas(service, 1)


class _load:  # noqa: N801 - a context manager
    """Clients that send one request after the other, until the end of the block; none may fail."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(_CLIENTS)

    def __enter__(self) -> None:
        self._running = [self._threads.submit(self._send, number) for number in range(_CLIENTS)]

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for running in self._running:
            running.result()
        self._threads.shutdown()

    def _send(self, first: int) -> None:
        for number in itertools.count(first):
            if self._ended.is_set():
                return
            stream(self._client, NAME, number % STREAMS)


def _wait_for_replicas(service: RunningService, count: int) -> None:
    def ready() -> bool:
        return service.status().get("readyReplicas") == count and len(service.pods("replicas")) == count

    wait_for(f"{count} replicas", _SECONDS_TO_SCALE, ready, every=1)
