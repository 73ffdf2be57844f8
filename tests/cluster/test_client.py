"""The Python client against a real API server: apply, refusals, wait, watch with asyncio, delete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from spotune.errors import RefusedError
from spotune_client import AsyncClient, Client
from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from spotune_testcluster.waiting import wait_for
from tests.api.support.job_files import a_job
from tests.cluster.definitions import apply_definitions
from tests.cluster.operator_install import no_operator
from tests.cluster.pods import pod, wait_until_running

pytestmark = pytest.mark.cluster

_LATE_SERVER = """
import socket, time
with socket.create_server(("", 8000)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    time.sleep(9)
    connection.sendall(b"late")
"""


@pytest.fixture
def namespace(cluster: ClusterUnderTest) -> Iterator[Kubectl]:
    """A namespace without an operator: the test writes the status."""
    apply_definitions(cluster.kubectl)
    with no_operator(cluster), temporary_namespace(cluster.kubectl) as kubectl:
        yield kubectl


def write_status(kubectl: Kubectl, name: str, **status: Any) -> None:
    """Write the status as the operator would."""
    patch = json.dumps([{"op": "add", "path": "/status", "value": status}])
    kubectl("patch", "ftj", name, "--subresource=status", "--type=json", "--patch", patch)


def test_a_job_from_apply_to_delete(namespace: Kubectl) -> None:
    job = a_job()
    name = job.metadata.name
    client = Client(namespace.namespace, kubeconfig=namespace.kubeconfig)
    applied = client.jobs.apply(job)
    assert applied.raw["spec"]["workers"]["count"] == job.spec.workers.count  # a default of the API server
    assert client.jobs.apply(job).raw["metadata"]["generation"] == applied.raw["metadata"]["generation"]
    with pytest.raises(RefusedError, match="already exists"):
        client.jobs.create(job)

    complete: dict[str, Any] = {"type": "Complete", "status": "True", "reason": "Trained", "message": ""}
    complete |= {"observedGeneration": 1, "lastTransitionTime": "2026-01-02T03:04:05Z"}
    write_status(namespace, name, observedGeneration=1, step=7, conditions=[])

    async def follow() -> list[int]:
        steps = []
        async with AsyncClient(namespace.namespace, kubeconfig=namespace.kubeconfig) as found:
            async for job in found.jobs.watch(name):
                steps.append(job.status.step)
                if steps == [7]:  # it is seen before it is overwritten
                    status = {"observedGeneration": 1, "conditions": [complete]}
                    await asyncio.to_thread(write_status, namespace, name, **status)
        return steps

    assert asyncio.run(follow()) == [7, 0]
    assert client.jobs.wait(name, timeout=10).outcome == "Complete"
    client.jobs.delete(name, wait=True, timeout=60)
    assert client.jobs.list() == []


@pytest.mark.long
def test_a_port_forward_without_data_stays_open_because_its_pings_are_answered(
    cluster: ClusterUnderTest, namespace: Kubectl
) -> None:
    namespace.apply(pod("server", cluster.image, ("python3", "-c", _LATE_SERVER)))
    wait_until_running(namespace, "server")
    wait_for("the server listens", 60, lambda: "listens" in namespace("logs", "server"))
    options = ClusterOptions(namespace.namespace, namespace.kubeconfig)
    with open_cluster(options, quiet_seconds=3.0).connect("server", 8000) as connection:
        assert connection.read(4) == b"late"
