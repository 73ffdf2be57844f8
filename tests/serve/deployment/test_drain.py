"""A drain of Ray nodes with replicas (`ray drain-node`): no stream breaks, and new requests go to those that stay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.serve.support.exported import export_tiny_model
from tests.serve.support.openai_streams import resumptions, streams_during, undisturbed_streams
from tests.serve.support.ray_serve import RayServe

pytestmark = [pytest.mark.ray, pytest.mark.long]

NAME = "tiny"
PATIENCE_SECONDS = 120.0
DRAIN_SECONDS = 60
GATEWAY, FIRST, SECOND, SPARE = range(4)
"""Numbers of the nodes."""
MAX_TOKENS = 7_000
"""So many that a stream runs until its client leaves. A replica has space for eight such sequences at once."""
REPLICA_NODE = {"spotune_replica": 1.0}


def applications(model: Path) -> list[dict[str, Any]]:
    """A gateway, and two replicas that never share a node."""
    version = {"application": "model-1", "directory": str(model), "version": "1", "weight": 1}
    return [
        {
            "name": "spotune",
            "import_path": "spotune_serve.deployment.cluster:build_gateway",
            "route_prefix": "/",
            "args": {"name": NAME},
            "deployments": [{"name": "Gateway", "num_replicas": 1, "user_config": {"versions": [version]}}],
        },
        {
            "name": "model-1",
            "import_path": "spotune_serve.deployment.cluster:build_model",
            "route_prefix": None,
            "args": {"directory": str(model), "drainSeconds": DRAIN_SECONDS},
            "deployments": [{"name": "Replica", "num_replicas": 2}],
        },
    ]


@contextmanager
def running_streams(service: RayServe, count: int) -> Iterator[None]:
    """As many streams, which have begun and do not end before the block does."""
    body = {"model": NAME, "prompt": "how many", "max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True}
    read: list[Iterator[str]] = []  # an iterator that is dropped ends its stream
    with ExitStack() as streams:
        for _ in range(count):
            response = streams.enter_context(service.client.stream("POST", "/v1/completions", json=body))
            assert response.status_code == 200
            read.append(response.iter_lines())
            assert json.loads(next(read[-1]).removeprefix("data: "))["choices"]
        yield


def requests_by_node(service: RayServe, count: int) -> dict[int, int]:
    """Number of running requests of each replica by its node, while as many streams run."""
    wait_until(lambda: not sum(service.ongoing_requests("Replica").values()))
    with running_streams(service, count):
        return service.ongoing_requests("Replica")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.timeout(600)
def test_streams_and_new_requests_survive_drained_nodes(tmp_path: Path) -> None:
    model = export_tiny_model(tmp_path / "model", "causal", max_position_embeddings=2 * MAX_TOKENS)
    with RayServe([{"spotune_gateway": 1.0}, REPLICA_NODE, REPLICA_NODE]) as service:
        service.deploy(*applications(model))
        assert service.wait_until_running() == {"Gateway": 1, "Replica": 2}
        service.wait_for("/healthz")
        url = f"{service.client.base_url}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as client:
            undisturbed = undisturbed_streams(client, NAME)
            assert requests_by_node(service, 4) == {FIRST: 2, SECOND: 2}

            # There is no node for a replacement: the first replica stays, with what it has.
            assert streams_during(client, NAME, lambda: service.drain_node(FIRST, 3600)) == undisturbed
            wait_until(lambda: requests_by_node(service, 4) == {FIRST: 0, SECOND: 4})
            assert streams_during(client, NAME, lambda: None) == undisturbed
            assert requests_by_node(service, 8) == {FIRST: 0, SECOND: 8}

            # A node comes: the replacement runs there, and the first replica leaves.
            service.add_node(REPLICA_NODE)
            wait_until(lambda: service.ongoing_requests("Replica").keys() == {SECOND, SPARE})
            assert requests_by_node(service, 4) == {SECOND: 2, SPARE: 2}

            # The drain time reaches until the deadline: the replica finishes its streams and leaves.
            assert streams_during(client, NAME, lambda: service.drain_node(SECOND, DRAIN_SECONDS)) == undisturbed
            wait_until(lambda: service.ongoing_requests("Replica").keys() == {SPARE})
            assert streams_during(client, NAME, lambda: None) == undisturbed
            assert resumptions(client) == 0, "replicas finish what they have begun"
