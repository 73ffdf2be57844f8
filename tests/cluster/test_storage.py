"""ReadWriteMany volumes of the test cluster: shared by nodes, with an enforced size, and with faults."""

import pytest

from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_testcluster.volumes import VolumeState
from spotune_testcluster.waiting import wait_for
from tests.cluster.pods import claim, pod, run_in, wait_until_running

pytestmark = pytest.mark.cluster

FILL = "dd if=/dev/zero of=/data/fill bs=1M count={} conv=fsync 2>&1"


@pytest.fixture
def shared(cluster: ClusterUnderTest, namespace: Kubectl) -> Kubectl:
    """Two pods on two nodes that mount a claim of 300 MiB at /data."""
    writer = pod("writer", cluster.image, node=cluster.nodes[0], claims={"/data": "data"})
    reader = pod("reader", cluster.image, node=cluster.nodes[1], claims={"/data": "data"})
    namespace.apply(claim("data", "300Mi", cluster.storage_class), writer, reader)
    wait_until_running(namespace, "writer", "reader")
    return namespace


def _shell(kubectl: Kubectl, name: str, script: str) -> str:
    return run_in(kubectl, name, "bash", "-c", script)


def test_claim_waits_for_its_first_consumer(cluster: ClusterUnderTest, namespace: Kubectl) -> None:
    namespace.apply(claim("data", "300Mi", cluster.storage_class))
    said = wait_for(
        "an event", 20, lambda: namespace("get", "events", "--output=jsonpath={.items[*].reason}"), every=0.3
    )
    assert "WaitForFirstConsumer" in said
    assert namespace.get("pvc", "data")["status"]["phase"] == "Pending"


def test_two_nodes_share_a_volume(shared: Kubectl) -> None:
    _shell(shared, "writer", "echo from-n1 > /data/a && sync")
    assert _shell(shared, "reader", "cat /data/a && echo from-n2 > /data/b") == "from-n1\n"
    assert _shell(shared, "writer", "cat /data/b") == "from-n2\n"


def test_full_volume_says_enospc_until_it_has_grown(shared: Kubectl) -> None:
    with pytest.raises(KubectlError, match="code 1"):
        _shell(shared, "writer", FILL.format(400))
    said = _shell(shared, "writer", FILL.format(400) + "; true")
    assert "No space left on device" in said
    shared("patch", "pvc", "data", '--patch={"spec":{"resources":{"requests":{"storage":"600Mi"}}}}')
    wait_for("growth", 30, lambda: shared.get("pvc", "data")["status"]["capacity"]["storage"] == "600Mi", every=0.3)
    assert "No space left" not in _shell(shared, "writer", FILL.format(400))


def test_read_only_volume_says_erofs_on_every_node(shared: Kubectl, fault: Fault) -> None:
    _shell(shared, "writer", "echo before > /data/a")
    volume = shared.get("pvc", "data")["spec"]["volumeName"]
    fault.set_volume(volume, VolumeState.READ_ONLY)
    for name in ("writer", "reader"):
        assert "Read-only file system" in _shell(shared, name, "touch /data/b 2>&1; cat /data/a")
    fault.set_volume(volume, VolumeState.NORMAL)
    assert _shell(shared, "reader", "echo after > /data/b; cat /data/b") == "after\n"


def test_slow_volume_is_slower(shared: Kubectl, fault: Fault) -> None:
    """A disk that others use may be slow for a while, too, but not faster than the limit of 1 MiB/s."""
    write = "dd if=/dev/zero of=/data/t bs=1M count=4 conv=fsync 2>/dev/null"
    timed = f"before=$(date +%s%N); {write}; echo $(($(date +%s%N) - before))"

    def seconds() -> float:
        return int(_shell(shared, "writer", timed)) / 1e9

    wait_for("a write without the limit", 120, lambda: seconds() < 1)
    fault.set_volume(shared.get("pvc", "data")["spec"]["volumeName"], VolumeState.SLOW)
    assert seconds() > 3
