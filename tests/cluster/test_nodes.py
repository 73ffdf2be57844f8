"""Nodes of the test cluster: their objects in Kubernetes, and effects of a crash, a reclaim and a network cut."""

from functools import partial
from typing import Any

import pytest

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault, conditions
from spotune_testcluster.waiting import wait_for
from tests.cluster.pods import claim, pod, run_in, wait_until_running

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def _settled(cluster: ClusterUnderTest, name: str) -> dict[str, Any] | None:
    """The node; None as long as the control plane keeps pods off it, as it does for some seconds after its start."""
    node: dict[str, Any] = cluster.kubectl.get("node", name)
    taints = [taint["key"] for taint in node["spec"].get("taints", [])]
    return None if any(key.startswith("node.kubernetes.io/") for key in taints) else node


def _ready(cluster: ClusterUnderTest, node: str) -> str:
    return conditions(cluster.kubectl.get("node", node))["Ready"]


def test_spot_nodes_carry_the_providers_labels_and_taints(cluster: ClusterUnderTest) -> None:
    cluster.machine_for("a pool of pretended spot nodes")
    on_demand, spot = (
        wait_for(f"{name} without taints of Kubernetes", 60, partial(_settled, cluster, name)) for name in ("n1", "n2")
    )
    assert spot["spec"]["providerID"].startswith("azure://")
    assert spot["metadata"]["labels"]["kubernetes.azure.com/scalesetpriority"] == "spot"
    assert "kubernetes.azure.com/scalesetpriority" not in on_demand["metadata"]["labels"]
    taints = [(taint["key"], taint["value"], taint["effect"]) for taint in spot["spec"]["taints"]]
    assert taints == [("kubernetes.azure.com/scalesetpriority", "spot", "NoSchedule")]
    assert "taints" not in on_demand["spec"]


@pytest.mark.long
def test_crashed_node_is_noticed_and_comes_back_with_its_pods(
    cluster: ClusterUnderTest, namespace: Kubectl, fault: Fault
) -> None:
    cluster.machine_for("fault crash_node")
    restarted = pod("survivor", cluster.image, node="n3")
    restarted["spec"]["restartPolicy"] = "Always"
    namespace.apply(restarted)
    wait_until_running(namespace, "survivor")
    fault.crash_node("n3")
    wait_for("Ready=Unknown", 120, lambda: _ready(cluster, "n3") == "Unknown", every=0.5)
    fault.start_node("n3")
    assert _ready(cluster, "n3") == "True"
    wait_for("the container's restart", 120, lambda: _restarts(namespace) == 1, every=0.5)
    wait_until_running(namespace, "survivor")


def test_stopped_node_gives_its_containers_notice(cluster: ClusterUnderTest, namespace: Kubectl, fault: Fault) -> None:
    """The container gets SIGTERM and has the notice time until it is killed, as at a spot reclaim."""
    cluster.machine_for("fault stop_node")
    script = "trap 'echo told > /data/said; sync; exit 0' TERM; echo up > /data/said; while true; do sleep 1; done"
    told = pod("told", cluster.image, ("bash", "-c", script), node="n3", claims={"/data": "data"})
    witness = pod("witness", cluster.image, node=cluster.nodes[0], claims={"/data": "data"})
    namespace.apply(claim("data", "300Mi", cluster.storage_class), told, witness)
    wait_until_running(namespace, "told", "witness")
    said = ("bash", "-c", "cat /data/said || true")
    wait_for("the container", 60, lambda: run_in(namespace, "witness", *said) == "up\n")
    fault.stop_node("n3", 10)
    assert run_in(namespace, "witness", "cat", "/data/said") == "told\n"


@pytest.mark.long
def test_cut_node_is_unknown_while_its_pods_run_on(cluster: ClusterUnderTest, namespace: Kubectl, fault: Fault) -> None:
    cluster.machine_for("fault cut")
    count = "for i in $(seq 1000); do echo $i > /tmp/count; sleep 0.2; done"
    namespace.apply(pod("counter", cluster.image, ("bash", "-c", count), node="n3"))
    wait_until_running(namespace, "counter")
    before = int(run_in(namespace, "counter", "cat", "/tmp/count"))
    fault.cut("n3")
    wait_for("Ready=Unknown", 120, lambda: _ready(cluster, "n3") == "Unknown", every=0.5)
    fault.restore("n3")
    wait_for("Ready=True", 120, lambda: _ready(cluster, "n3") == "True", every=0.5)
    assert int(run_in(namespace, "counter", "cat", "/tmp/count")) > before + 50
    assert namespace.get("pod", "counter")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_pods_of_a_cut_service_are_reached_by_nobody(
    cluster: ClusterUnderTest, namespace: Kubectl, fault: Fault
) -> None:
    served = pod(
        "served",
        cluster.image,
        ("python3", "-m", "http.server", "8000"),
        node=cluster.nodes[0],
        labels={"app": "served"},
    )
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "served"},
        "spec": {"selector": {"app": "served"}, "ports": [{"port": 8000}]},
    }  # fmt: skip
    clients = {"near": cluster.nodes[0], "far": cluster.nodes[1]}
    namespace.apply(service, served, *(pod(name, cluster.image, node=node) for name, node in clients.items()))
    wait_until_running(namespace, "served", *clients)

    def reached(client: str) -> bool:
        address = f"http://served.{namespace.namespace}.svc:8000"
        get = f"curl --silent --max-time 2 --output /dev/null {address} && echo reached || true"
        return "reached" in run_in(namespace, client, "bash", "-c", get)

    wait_for("both clients", 30, lambda: all(reached(client) for client in clients), every=0.5)
    fault.cut(f"{namespace.namespace}/served")
    assert [reached(client) for client in clients] == [False, False]
    fault.restore(f"{namespace.namespace}/served")
    wait_for("both clients again", 30, lambda: all(reached(client) for client in clients), every=0.5)


def _restarts(kubectl: Kubectl) -> int:
    count: int = kubectl.get("pod", "survivor")["status"]["containerStatuses"][0]["restartCount"]
    return count
