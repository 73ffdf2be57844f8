"""Several gateway processes on one port of one machine: all answer, one may die, and their metrics are sums."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from spotune.errors import UsageError
from spotune_serve.deployment.config import GatewayConfig, ModelConfig
from spotune_serve.deployment.local import local_service
from tests.serve.support.exported import export_tiny_model
from tests.serve.support.live_service import LiveService
from tests.serve.support.openai_streams import stream

pytestmark = [pytest.mark.ray, pytest.mark.long]
GATEWAYS = 2
PATIENCE_SECONDS = 120.0
REQUESTS = "spotune:requests_total"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    model = export_tiny_model(tmp_path_factory.mktemp("model"), "causal")
    with LiveService(model, "--gateways", str(GATEWAYS)) as started:
        yield started


def get(service: LiveService, path: str) -> str:
    """A page, by a new connection."""
    with urllib.request.urlopen(service.url + path, timeout=PATIENCE_SECONDS) as response:
        content: str = response.read().decode()
    return content


def complete(service: LiveService) -> None:
    """Ask for one token by a new connection.

    Raises:
        OSError, HTTPException: the connection broke, or the status is not 200.
    """
    body = {"model": service.ready["model"], "prompt": "how", "max_tokens": 1, "ignore_eos": True}
    request = urllib.request.Request(
        f"{service.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        json.load(response)


def metric(service: LiveService, name: str) -> float:
    lines = [line for line in get(service, "/metrics").splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def accepting(service: LiveService) -> Counter[int]:
    """How many connections each process has, of 64 new ones."""
    port = int(service.url.rpartition(":")[2])
    pids = service.gateways()
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
    try:
        deadline = time.monotonic() + 10
        while True:
            found = Counter({pid: len(_sockets(pid, port)) for pid in pids})
            if found.total() >= len(connections) or time.monotonic() > deadline:
                return found
            time.sleep(0.1)
    finally:
        for connection in connections:
            connection.close()


def _sockets(pid: int, port: int) -> set[str]:
    """Inodes of the established connections of a process to its port."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "01":
            found.add(f"socket:[{fields[9]}]")
    files = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            files.add(str(path.readlink()))
    return found & files


def test_all_gateways_take_connections_of_one_port(service: LiveService) -> None:
    found = accepting(service)
    assert len(found) == GATEWAYS
    assert all(found.values()), found


def test_each_gateway_reports_the_requests_of_all(service: LiveService) -> None:
    before = metric(service, REQUESTS)
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(complete, service) for _ in range(40)]:
            done.result()
    assert {metric(service, REQUESTS) for _ in range(20)} == {before + 40}
    stats = [json.loads(get(service, "/stats")) for _ in range(20)]
    assert len({each["process"] for each in stats}) == 1
    (name,) = stats[0]["versions"]
    assert {each["versions"][name]["requests"] for each in stats} == {before + 40}


def test_requests_are_answered_while_a_gateway_is_killed_and_comes_back(service: LiveService) -> None:
    """Only requests to the killed process may break: one of each client, and more until it has closed its socket.

    Metrics keep what it has counted.
    """
    before = metric(service, REQUESTS)
    killed, *others = service.gateways()
    stop, dead = threading.Event(), threading.Event()
    answered = Counter[bool]()
    broken_before: list[Exception] = []
    broken_after: list[Exception] = []

    def ask_until_stopped() -> None:
        while not stop.is_set():
            was_dead = dead.is_set()
            try:
                complete(service)
            except (OSError, HTTPException) as error:
                (broken_after if was_dead else broken_before).append(error)
            else:
                answered[was_dead] += 1

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(ask_until_stopped) for _ in range(8)]
        try:
            wait_until(lambda: answered[False] > 100)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{killed}").exists())
            dead.set()
            wait_until(lambda: len(service.gateways()) == GATEWAYS and answered[True] > 100)
            wait_until(lambda: all(accepting(service).values()))
        finally:
            stop.set()
        for each in running:
            each.result()
    assert broken_after == []
    assert len(broken_before) <= 3 * 8, "only requests that met the process while it died are broken"
    assert killed not in service.gateways()
    assert set(others) < set(service.gateways()), "the other one never restarted"
    counted = metric(service, REQUESTS) - before
    assert sum(answered.values()) <= counted <= sum(answered.values()) + len(broken_before)
    assert metric(service, "vllm:num_requests_running") == metric(service, "vllm:num_requests_waiting") == 0


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_no_other_service_shares_the_port(service: LiveService, tmp_path: Path) -> None:
    """The kernel would let it: both belong to one user."""
    port = int(service.url.rpartition(":")[2])
    for gateways in (1, 2):
        second = local_service(GatewayConfig("tiny", processes=gateways), ModelConfig(tmp_path), "127.0.0.1", port)
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 cannot be used"), second:
            raise AssertionError("the second service started")


def test_running_requests_of_all_gateways_finish_at_a_stop(service: LiveService) -> None:
    """The last test of the service: it ends."""
    name, number = str(service.ready["model"]), 8
    with OpenAI(base_url=service.ready["openaiBaseUrl"], api_key="none", max_retries=0) as client:
        expected = stream(client, name, 1)
    begun = threading.Barrier(number + 1)

    def stream_by_own_connection() -> str:
        with OpenAI(base_url=service.ready["openaiBaseUrl"], api_key="none", max_retries=0) as client:
            return stream(client, name, 1, begun)

    with ThreadPoolExecutor(number) as threads:
        running = [threads.submit(stream_by_own_connection) for _ in range(number)]
        begun.wait(timeout=PATIENCE_SECONDS)
        service.signal(signal.SIGINT)
        assert [each.result() for each in running] == [expected] * number
    assert service.wait() == (0, "")
