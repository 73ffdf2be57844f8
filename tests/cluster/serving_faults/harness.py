"""A service under streams, access to what a fault can hit, and the checks after every fault."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spotune_operator.children.ports import SERVE
from spotune_testcluster.cluster import Cluster
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_testcluster.waiting import wait_for
from tests.cluster.model_services import RunningService
from tests.cluster.operator_install import Operator
from tests.cluster.serving_faults.client import Stream
from tests.cluster.serving_faults.client_pod import ClientPod, Streams
from tests.cluster.serving_faults.records import Record

STREAMS = 220
IN_MID_ANSWER = 200
"""At least so many streams are in mid-answer when a fault is injected."""
_STARTS = 5
REPLICAS = 2
GATEWAYS = 2
SECONDS_TO_LOSE = 300.0
RESUMPTIONS = "spotune:stream_resumptions_total"


@dataclass
class ServingHarness:
    """The service, and what a fault can hit.

    Attributes:
        cluster: The cluster.
        fault: Injects faults of nodes and of the control plane.
        operator: The operator.
        service: The service.
        clients: The pod of the clients.
        undisturbed: Texts of all streams without a fault.
    """

    cluster: ClusterUnderTest
    fault: Fault
    operator: Operator
    service: RunningService
    clients: ClientPod
    undisturbed: Sequence[str] = field(repr=False)

    @property
    def kubectl(self) -> Kubectl:
        """Kubectl in the namespace of the service."""
        return self.service.kubectl

    def machine(self, what: str) -> Cluster:
        """The machine that runs the cluster; skips the test on an external cluster."""
        return self.cluster.machine_for(what)

    def delete(self, pods: Sequence[dict[str, Any]], *options: str) -> None:
        """Delete pods without waiting."""
        self.kubectl("delete", "pods", *(pod["metadata"]["name"] for pod in pods), "--wait=false", *options)

    def is_ready(self) -> bool:
        """Whether the service is Ready with all its replicas."""
        ready = self.service.condition("Ready").get("status") == "True"
        return ready and self.service.status()["readyReplicas"] == REPLICAS

    def resumptions(self) -> float:
        """How often a stream continued at another replica, over all gateways."""
        addresses = [f"{pod['status']['podIP']}:{SERVE.number}" for pod in self.service.pods("gateway")]
        return self.clients.metric(RESUMPTIONS, addresses)

    def assert_streams_survive(self, inject: Callable[[ServingHarness], list[dict[str, Any]]], record: Record) -> None:
        """Inject a fault while all streams are in mid-answer: none fails, and each has the text without the fault.

        Args:
            inject: Injects the fault; returns the pods that it hits, as they were before.
            record: Gets what was measured.
        """
        self.service.wait_until_ready(REPLICAS)
        with self._streams_in_mid_answer() as streams:
            before = self.resumptions()
            with self._readiness() as readiness:
                since = time.time()
                hit = inject(self)
                results = streams.results()
                self.fill(record, results, since)
                self.wait_until_replaced(hit)
            record.ready_seconds = readiness.seconds_since(since)
        record.resumptions = round(self.resumptions() - before)
        assert not record.failed, next(stream.error for stream in results if stream.error)
        assert not record.other_text, f"{record.other_text} texts differ: {self.first_difference(results)}"
        assert record.in_mid_answer >= IN_MID_ANSWER, f"{record.in_mid_answer} streams were in mid-answer"

    @contextmanager
    def _streams_in_mid_answer(self) -> Iterator[Streams]:
        """Streams of which all have begun and nearly none has ended.

        They are started again if the first ones end before the last ones begin: on a busy machine, or where one replica
        has most of them because a gateway has not seen the other one yet.
        """
        ended = STREAMS
        for _ in range(_STARTS):
            with self.clients.streams(STREAMS) as streams:
                streams.wait_until_begun()
                ended = streams.ended
                if STREAMS - ended >= IN_MID_ANSWER:
                    yield streams
                    return
                streams.results()
        raise AssertionError(f"{ended} streams of {STREAMS} had ended when the last one began")

    def wait_until_replaced(self, hit: Sequence[dict[str, Any]]) -> None:
        """Wait until pods are gone, or have restarted a container; and until the service is Ready."""
        for pod in hit:
            name = pod["metadata"]["name"]
            wait_for(f"the loss of {name}", SECONDS_TO_LOSE, partial(self._is_lost, pod), every=0.5)
        self.service.wait_until_ready(REPLICAS)

    def _is_lost(self, before: dict[str, Any]) -> bool:
        uid = before["metadata"]["uid"]
        found = [pod for pod in self.kubectl.get("pods") if pod["metadata"]["uid"] == uid]
        return not found or _starts(found[0]) > _starts(before)

    def fill(self, record: Record, results: Sequence[Stream], since: float) -> None:
        """Note what clients have seen of a fault at that Unix time."""
        gaps = [stream.gap for stream in results]
        record.requests = len(results)
        record.in_mid_answer = sum(0 < stream.first < since < stream.last for stream in results)
        record.failed = sum(bool(stream.error) for stream in results)
        record.other_text = sum(stream.text != self.undisturbed[stream.number] for stream in results)
        record.gap_p50_seconds = round(statistics.median(gaps), 1)
        record.gap_max_seconds = round(max(gaps), 1)

    def first_difference(self, results: Sequence[Stream]) -> str:
        """The first text that differs, beside the right one."""
        for stream in results:
            right = self.undisturbed[stream.number]
            if stream.text != right:
                pairs = zip(stream.text, right, strict=False)
                start = next((at for at, (one, other) in enumerate(pairs) if one != other), len(right))
                found = stream.text[start : start + 40]
                return f"stream {stream.number}, character {start}: {found!r}, not {right[start : start + 40]!r}"
        return "none"

    @contextmanager
    def _readiness(self) -> Iterator[_Readiness]:
        """Watch whether the service is Ready, until the end of the block."""
        readiness = _Readiness(self.is_ready)
        thread = threading.Thread(target=readiness.watch)
        thread.start()
        try:
            yield readiness
        finally:
            readiness.ended.set()
            thread.join()


class _Readiness:
    """Asks twice a second whether a service is Ready.

    Args:
        is_ready: Asks once.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._last_not_ready = 0.0
        self.ended = threading.Event()

    def watch(self) -> None:
        """Ask until the end."""
        while not self.ended.wait(0.5):
            try:
                if not self._is_ready():
                    self._last_not_ready = time.time()
            except (KubectlError, KeyError):
                continue

    def seconds_since(self, since: float) -> float | None:
        """Seconds until the service was Ready for good; None if it always was."""
        return round(self._last_not_ready - since, 1) if self._last_not_ready > since else None


def _starts(pod: dict[str, Any]) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))
