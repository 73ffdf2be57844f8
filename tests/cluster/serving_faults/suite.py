"""Injects every fault into a service under streams; run by `make serving-faults`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spotune.custom_resource.object_names import WORKER_CONTAINER
from spotune_testcluster.providers import Provider
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_testcluster.settings import NodeSettings
from tests import ROOT
from tests.cluster.containers import kill_container
from tests.cluster.finetune_jobs import INPUTS, READER, Workplace, copy_to_pod
from tests.cluster.model_services import RunningService, running_service, service_manifest
from tests.cluster.operator_install import Operator
from tests.cluster.redis import start_redis
from tests.cluster.rights import refused
from tests.cluster.serving_faults import tampering
from tests.cluster.serving_faults.catalogue import CASES, GATEWAY_KILLED, TOKEN_DROPPED, TOKEN_REPEATED, Case
from tests.cluster.serving_faults.client_pod import ClientPod, start_client_pod
from tests.cluster.serving_faults.harness import GATEWAYS, REPLICAS, STREAMS, ServingHarness
from tests.cluster.serving_faults.records import TOKENS, recorded
from tests.cluster.serving_faults.replicas import replica_container_killed
from tests.cluster.serving_faults.trained_model import trained_once

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

NAME = "counting"
_MODEL = "counting-model"
_CLIENT_RETRY_SECONDS = 60.0
_SPARE = NodeSettings(number=4, provider=Provider.AKS, zone="westeurope-1")
"""A second on-demand node, for the head alone."""


@pytest.fixture(scope="module")
def place(cluster: ClusterUnderTest, operator: Operator, workplace: Workplace) -> Iterator[Workplace]:
    """The workplace with a trained model, a Redis, a pod for clients, and an operator that serves."""
    machine = cluster.machine_for("faults of nodes and containers")
    export = trained_once(ROOT / "build" / "serving-faults-model")
    copy_to_pod(workplace.kubectl, READER, export, f"{INPUTS}/{_MODEL}")
    start_client_pod(workplace.kubectl, cluster.image, cluster.nodes[0])
    machine.add_node(_SPARE)
    with operator.with_values("serving.enabled=true"):
        yield workplace


@pytest.fixture(scope="module")
def service(place: Workplace) -> Iterator[RunningService]:
    address = start_redis(place.cluster.machine_for("Redis"), place.kubectl, place.cluster.nodes[0])
    with serving(place, NAME, gateways=GATEWAYS, redis=address) as found:
        yield found


@contextmanager
def serving(place: Workplace, name: str, gateways: int, redis: str = "", **gateway: object) -> Iterator[RunningService]:
    """A service of the trained model, Ready; deleted at the end of the block."""
    manifest = service_manifest(place, name, replicas={"min": REPLICAS, "max": REPLICAS})
    spec = manifest["spec"]
    spec["model"] = {"claim": {"name": spec["model"]["claim"]["name"], "path": f"inputs/{_MODEL}"}}
    spec["gateway"] |= {"replicas": gateways, **gateway}
    spec["cluster"] |= {"redisAddress": redis} if redis else {}
    with running_service(place, manifest) as found:
        found.wait_until_ready(REPLICAS)
        yield found


@pytest.fixture(scope="module")
def undisturbed(service: RunningService) -> list[str]:
    """The texts without a fault, twice the same."""
    clients = _clients(service)
    texts = clients.texts(STREAMS)
    assert len(set(texts)) > STREAMS * 0.9, "the texts vary, so a mixed-up stream would be noticed"
    assert clients.texts(STREAMS) == texts
    return texts


def _clients(service: RunningService) -> ClientPod:
    return ClientPod(service.kubectl, service.status()["url"], service.name, TOKENS)


@pytest.fixture
def harness(
    cluster: ClusterUnderTest, fault: Fault, operator: Operator, service: RunningService, undisturbed: list[str]
) -> ServingHarness:
    return ServingHarness(cluster, fault, operator, service, _clients(service), undisturbed)


def test_only_streams_of_a_killed_gateway_end(harness: ServingHarness) -> None:
    """They end at once, with an error that names the connection. All later requests are answered by the other one."""
    with recorded(GATEWAY_KILLED) as record:
        machine = harness.machine("kill -9 of a container")
        harness.service.wait_until_ready(REPLICAS)
        lost = harness.service.pods("gateway")[0]
        with harness.clients.streams(STREAMS // 2) as begun:
            begun.wait_until_begun()
            since = time.time()
            kill_container(machine, lost, WORKER_CONTAINER)
            with harness.clients.streams(STREAMS // 2, _CLIENT_RETRY_SECONDS) as later:
                later.wait_until_begun()
                answered = later.results()
            interrupted = begun.results()
        harness.fill(record, [*interrupted, *answered], since)
        broken = [stream for stream in interrupted if stream.error]
        record.failed = len(broken)
        assert 0 < len(broken) < len(interrupted), f"{len(broken)} of {len(interrupted)} streams ended"
        assert all("peer closed connection" in stream.error for stream in broken), {stream.error for stream in broken}
        assert max(stream.last for stream in broken) - since < 30, "a broken stream hung"
        whole = [stream for stream in [*interrupted, *answered] if not stream.error]
        record.other_text = sum(stream.text != harness.undisturbed[stream.number] for stream in whole)
        assert not record.other_text, harness.first_difference(whole)
        assert not [stream.error for stream in answered if stream.error]
        harness.wait_until_replaced([lost])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.slug)
def test_streams_survive(case: Case, harness: ServingHarness) -> None:
    with recorded(case.name) as record:
        if case.prepare is not None:
            case.prepare(harness)
        harness.assert_streams_survive(case.inject, record)


@pytest.mark.parametrize(
    ("name", "script"),
    [(TOKEN_REPEATED, tampering.REPEATS_A_TOKEN), (TOKEN_DROPPED, tampering.DROPS_A_TOKEN)],
    ids=["repeated", "dropped"],
)
def test_a_wrong_token_is_noticed(
    name: str, script: str, cluster: ClusterUnderTest, fault: Fault, operator: Operator, place: Workplace,
    undisturbed: list[str],
) -> None:  # fmt: skip
    """The gateway's image is changed, and the assertion of all other faults fails."""
    with recorded(name) as record:
        place.kubectl.apply(tampering.config_map(script))
        with serving(place, "tampered", gateways=1, podTemplate=tampering.POD_TEMPLATE) as service:
            harness = ServingHarness(cluster, fault, operator, service, _clients(service), undisturbed)
            with pytest.raises(AssertionError, match="texts differ"):
                harness.assert_streams_survive(replica_container_killed, record)
            assert not record.failed
            assert 0 < record.other_text <= record.resumptions


@pytest.mark.usefixtures("service")
def test_the_operator_has_all_rights_that_it_used(cluster: ClusterUnderTest, operator: Operator) -> None:
    assert not refused(cluster.machine_for("the audit log").files.audit_log, operator.replaced)
